"""Contents of a checkpoint of the trainer, written by all ranks and readable by any layout.

    config.json, tokenizer.json, …          copied from the policy's folder
    model-00001-of-00004.safetensors        weights by folder name, each tensor whole, in one file
    model.safetensors.index.json            which file has which: transformers and SGLang load this
    trainer/optimizer-00000.safetensors     a rank's own parts of the optimizer's state
    trainer/rng-00000.safetensors           a rank's random number generators
    trainer/position.json                   weight version, optimizer steps, precision, layout

A tensor that several ranks hold is written by one of them. Tensor-parallel parts of a weight are
joined for the model files, expert-parallel ones are whole experts already; optimizer state is
written part by part, each with its place in the whole tensor. ``CheckpointStore`` makes a folder
like this one complete or absent.
"""

from agent_rl.trainer.sharded.load import TrainerFolder, load_trainer, open_trainer
from agent_rl.trainer.sharded.save import save_trainer

__all__ = ["TrainerFolder", "load_trainer", "open_trainer", "save_trainer"]
