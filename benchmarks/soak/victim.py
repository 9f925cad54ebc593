"""The program that S3 kills."""

import asyncio

from benchmarks.soak.lives import be_victim

if __name__ == "__main__":
    asyncio.run(be_victim())
