"""A game of TextArena, whose ``step`` returns two values, as an environment."""

import textarena


class Played:
    def __init__(self, name="GuessTheNumber-v0"):
        self.game = textarena.make(name)

    def reset(self, seed, **row):
        self.game.reset(num_players=1, seed=seed)
        return " " + self.game.get_observation()[1]

    def step(self, text):
        is_done, _ = self.game.step(text)
        if is_done:
            rewards, _ = self.game.close()
            return None, float(rewards[0]), True
        return self.game.get_observation()[1], 0.0, False
