"""Long runs with deliberate faults: every accepted call must end once, whatever dies.

python -m benchmarks.soak            every scenario in full, half an hour
python -m benchmarks.soak --short    a short form of each, one minute
python -m benchmarks.soak S1 S3      some of them
"""
