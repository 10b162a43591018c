"""`ragen-apo view`: the runs of a folder as pages. Reads their files, writes nothing.

folder        the runs of the folder, and which paths may be read
state         whether somebody works on a run
growing       files that grow a line at a time: metrics, and an index of episodes
run_files     one run's files, read once and kept while they stay as they are
episodes      an episode turn by turn: folded texts, tokens, residuals
value_store   tasks and samples of Stage 1, without writing to the database
comparing     two runs on the same tasks
curves        series as SVG
shown         what a page says of a run
lists         filtered and ordered episodes
token_texts   the text of token ids
query         what an address asks for
site          what several pages need
*_pages       one class a subject: runs, episodes, values, two runs
routes        addresses, and what each answers
"""
