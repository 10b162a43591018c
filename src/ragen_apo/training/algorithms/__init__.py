"""The algorithms, one file each: formula, source, assumption, settings, traits and code.

`config.algorithms.ALGORITHMS` has a row for each. No module here imports torch before it computes.
Their mathematics is in `objectives`, as functions of tensors:

    algorithm                       advantage                       loss
    apo, oapl                       objectives.apo                  objectives.apo
    apo_turn                        objectives.turn_level           objectives.turn_level
    grpo, dr_grpo, rloo, gigpo      objectives.group_relative       objectives.policy_gradient
    brpo, reinforce_plus_plus       objectives.reinforce            objectives.policy_gradient
    ppo                             objectives.ppo                  objectives.policy_gradient, .ppo
"""
