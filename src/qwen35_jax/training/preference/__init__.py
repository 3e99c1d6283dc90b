"""Direct preference optimization: of two answers to a prompt, the model learns to give the chosen one more readily.

Source: Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model".

How a run goes. `packed_pairs` reads the pairs of a file into rows. `reference_log_probabilities` asks the model as it
is before the first step, the reference, once for every answer; what it says is kept beside the checkpoints, with
`save_reference`, so that there is one model in memory, and the same reference in a run that is resumed.
`ReferencedRows` puts both together for `Batches`, and `Preference` is what `train_step` minimizes.
"""
