"""Optional parts for environments: games, named actions, boards, drawn tasks, scripted policies,
environments of other packages.
"""
