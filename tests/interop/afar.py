"""Plays an episode with OpenEnv's own client, as a program of another host: nothing of ours in it.

Consumes a JSON object on its input: address, token, the keywords of `reset` and the actions.
Produces a JSON list on its output: the observation, the reward and whether it is done, of each.
"""

from __future__ import annotations

import json
import sys

from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

asked = json.load(sys.stdin)
headers = {"Authorization": f"Bearer {asked['token']}"} if asked["token"] else {}
with GenericEnvClient(base_url=asked["address"], headers=headers).sync() as client:
    results = [client.reset(**asked["reset"])]
    results += [client.step({"text": action}) for action in asked["actions"]]
json.dump([(each.observation, each.reward, each.done) for each in results], sys.stdout)
