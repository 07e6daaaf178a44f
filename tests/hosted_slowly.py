"""A module that takes longer to import than a call may take."""

import time

time.sleep(2.5)


class Slow:
    def reset(self, **row):
        pass

    def step(self, text):
        return None, 1.0, True
