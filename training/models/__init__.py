"""Models as files: their configuration, and how a trained one leaves the run. Needs no framework, except to predict.

hugging_face  the values of config.json; what the data needs of a model
initial       weights of a fresh network, the same in every framework
flops         the floating-point operations of a step, from the model's sizes alone
export        from a checkpoint to a model folder in Hugging Face's layout
hub           uploads such a folder, also in the background of a run
predict       answers of a model folder
"""
