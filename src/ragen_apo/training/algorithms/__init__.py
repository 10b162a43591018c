"""The algorithms, one file each: formula, source, assumption, settings, traits and code.

`config.algorithms.ALGORITHMS` has a row for each. No module here imports torch before it computes.
Mathematics that several share, or that has a derivation, is in `objectives`:

    algorithm                       advantage                       loss
    apo, oapl                       objectives.apo                  objectives.apo
    apo_turn                        objectives.turn_level           objectives.turn_level
    grpo, dr_grpo, rloo, gigpo,
    brpo, reinforce_plus_plus       in their files                  objectives.policy_gradient
    ppo                             objectives.ppo                  objectives.policy_gradient, .ppo
"""
