"""The phases of a run: what each reads, computes and writes, and the pipeline that joins them.

a whole run     pipeline
before it       inputs, memory, disk, origin; shown_prompt for people
Stage 1         values is the phase, collect_values its rollouts; stored_values and
                task_selection are what Stage 2 reads of it
distillation    distillation
Stage 2         training repeats the trainer's step; early_stop ends it, more_steps prolongs it
evaluation      evaluation, with search; api_evaluation for models behind an API
"""
