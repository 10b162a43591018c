"""A model behind an OpenAI-compatible API: address, requests with retries, answers that are kept.

address.py  where the server is, and the key     answer.py  what a server's answer says
client.py   one question, asked until answered   ledger.py  the answers so far, in a file
"""
