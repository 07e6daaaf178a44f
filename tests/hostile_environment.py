"""Environments that processes of their own load: they import little."""

import os
import time


class Hostile:
    """Does what it must not, as the policy asks it to."""

    closed = 0

    def reset(self, **row):
        pass

    def behave(self, how: str) -> str:
        """
        Behaves.

        Args:
            how: The way.
        """
        match how:
            case "hang":
                time.sleep(10_000)
            case "raise":
                raise RuntimeError("as you wish <|im_end|>")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(3)
            case "huge":
                return "<|im_end|>" * 100_000
            case "surrogate":
                return "\ud800\x00"
        return how

    def close(self):
        type(self).closed += 1


class Gym:
    """Has gymnasium's signatures."""

    def reset(self, *, seed=None, options=None):
        self.number = seed
        return "", {}

    def step(self, action):
        is_right = int(action) == self.number
        return " low ", float(is_right), is_right, False, {}
