"""A source to which things happen. Workers import this file, so it imports nothing that takes time."""

import os
import signal


class Once:
    """Wraps a source: does `action` when a unit is read for the first time, in a worker; `mark` remembers it."""

    def __init__(self, source, action, mark, unit, times=1):
        self.source, self.action, self.mark, self.unit, self.times = source, action, str(mark), unit, times
        self.waits = source.waits

    def read(self, unit, counts):
        done = len(os.listdir(self.mark))
        if unit.name == self.unit and done < self.times:
            open(f"{self.mark}/{done}-{os.getpid()}", "w").close()
            self.action()
        return self.source.read(unit, counts)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise AssertionError("no such luck")
