"""Runs of the example that are killed or disturbed.

python killed.py EVENT NUMBER ARGUMENTS...

EVENT is "file": SIGKILL before the NUMBER-th time that a file or folder in --out is opened to
write, made, renamed or removed; "twice": two SIGINT there; "line": SIGKILL in the middle of the
NUMBER-th line of metrics.jsonl; "full": no file can grow beyond NUMBER bytes from the second
checkpoint on, as on a full disk.
"""

import os
import resource
import signal
import sys
import time
from functools import partial

from examples.trainer import report, train_grpo
from examples.trainer.checkpoint import Checkpoints

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2)  # two signals at once would count as one
    time.sleep(60)  # so that the second signal ends it here


def befall_at_change(number, folder, act):
    seen = 0

    def hook(event, args):
        nonlocal seen
        written = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax")
        if (event in CHANGES or written) and str(args[0]).startswith(folder):
            seen += 1
            if seen == number:
                act()

    sys.addaudithook(hook)


def kill_in_line(number):
    whole = report.Report.add

    def add(self, step, *args):
        if step == number:
            self._file.write('{"step": 2, "lo')
            self._file.flush()
            kill()
        whole(self, step, *args)

    report.Report.add = add


def fill_disk(size):
    save = Checkpoints.save
    saves = []

    def limited(self, *args):
        saves.append(args)
        if len(saves) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        save(self, *args)

    Checkpoints.save = limited


if __name__ == "__main__":
    event = sys.argv[1]
    number = int(sys.argv[2])
    arguments = sys.argv[3:]
    folder = arguments[arguments.index("--out") + 1]
    events = {
        "file": partial(befall_at_change, number, folder, kill),
        "twice": partial(befall_at_change, number, folder, interrupt_twice),
        "line": partial(kill_in_line, number),
        "full": partial(fill_disk, number),
    }
    events[event]()
    sys.exit(train_grpo.main(arguments))
