"""Where good ends and bad begins: one set for the plan, the findings, the page and the comparison.

A threshold that only one rule of the findings has stands beside that rule.
"""

# Shares of right answers: means of the deciding reward
HARDLY_ANY_RIGHT, NEARLY_ALL_RIGHT = 0.05, 0.95
SOLVED = 0.8  # there is little left to learn

# Shares of the groups whose advantages are not all 0
FEW_TEACH, HARDLY_ANY_TEACH = 0.15, 0.03
SAME_TEXTS = 0.9  # of the groups have one text; the rest could hardly teach more

# Shares of the responses
MANY_CUT_OFF = 0.5
FAILS = 0.01  # a reward: a bug, or something that responses provoke

# How far one step moves the policy, as the KL in nats a token
FAR, TOO_FAR = 0.5, 2.0
NEAR = 0.2  # all steps together, as the square root

SURE = 0.05  # of held-out changes, the usual bound on p
