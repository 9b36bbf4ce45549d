"""Models as files: what a folder says, and how a trained one leaves the run. Needs no framework.

hugging_face  configurations by name; what the data asks of a model     export  from a checkpoint to a Hugging Face
folder model_flops   what a step costs, by the sizes alone                     hub     push such a folder, also beside a
run
"""
