"""`ragen-apo view`: the runs of a folder as pages. Reads their files, writes nothing.

folder        the runs of the folder, and which paths may be read
state         whether somebody works on a run
rows          lines of metrics, and an index of episodes
episodes      an episode turn by turn: tokens, V*, residuals
value_store   tasks and samples of Stage 1, without writing to the database
token_texts   the text of token ids
site          all that of the runs of a folder, read once and kept while it stays as it is
curves        series as SVG
shown         what a page says of a run
lists         filtered and ordered episodes
query         what an address asks for
*_pages       what each address answers, one file a subject: runs, episodes, values, two runs
routes        the addresses
"""
