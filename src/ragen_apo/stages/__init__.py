"""The phases of a run: what each reads, computes and writes, and the pipeline that joins them."""
