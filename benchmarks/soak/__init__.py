"""Long runs with faults on purpose: is every accepted call answered once, whatever dies?

python -m benchmarks.soak            every scenario in full, half an hour
python -m benchmarks.soak --short    a short form of each
python -m benchmarks.soak S1 S3      some of them
"""
