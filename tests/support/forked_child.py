"""A child process for tests of forking: it prints its identity, and ends as it is told."""

import os
import random
import sys

import msgspec


class Who(msgspec.Struct):
    pid: int
    parent: int
    group: int
    dice: float


def main() -> None:
    if sys.stdin.buffer.readline():
        who = Who(os.getpid(), os.getppid(), os.getpgrp(), random.random())
        print(msgspec.json.encode(who).decode(), flush=True)
        os._exit(int(sys.stdin.buffer.read() or 0))
