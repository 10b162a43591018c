"""Text adventures of TextWorld and ALFWorld: `make_textworld` makes the environment `textworld`.

games.py        the games of a folder, as tasks
engine.py       one game in progress, played by the packages textworld and alfworld
environment.py  options, observations, rewards
scripted.py     policies that play a second copy of the game
"""

from ragen_apo.environments.textworld.environment import make_textworld as make_textworld
