"""Models as files: where a pretrained one is, what its folder says, how a trained one leaves the run. Needs no framework.

pretrained    a folder, a bucket's or a name on the Hub: a folder here      export  from a checkpoint to a Hugging Face folder
hugging_face  configurations by name; what the data asks of a model         hub     push such a folder, also beside a run
model_flops   what a step costs, by the sizes alone
"""
