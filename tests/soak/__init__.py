"""Long runs with deliberate faults: every accepted call must end once, whatever dies.

python -m tests.soak            every scenario in full, half an hour
python -m tests.soak --short    a short form of each, a minute and a half
python -m tests.soak S1 S3      some of them
"""
