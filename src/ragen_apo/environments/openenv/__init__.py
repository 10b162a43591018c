"""Any text environment by OpenEnv.

    records   action, observation, state
    client    for the programs of users
    session   one client's episodes on the server
    serving   the server; `ragen-apo serve openenv NAME`

All but `serving` need the package `openenv` (extra `openenv`) to be imported.
"""
