"""Fine-tunes a small BERT to name the intent of a sentence, with Hugging Face's Trainer.

A program as it would run anywhere: nothing of tpu-launch is imported. One process for each device; the Trainer averages
the gradients of all processes. See README.md for how each host starts it.

    tpu-launch run -f examples/hugging_face/run.yaml         on every host of a slice
    python train.py --output_dir out                         here
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

INTENTS = {
    "card": ["my card was swallowed", "a new card", "the card does not work", "block my card"],
    "transfer": ["a transfer is missing", "send money abroad", "cancel the transfer", "transfer to my savings"],
    "balance": ["what is my balance", "how much money is left", "the balance is wrong", "show the account"],
    "rates": ["the exchange rate for euros", "which rate do i get", "fees of changing money", "the rate was bad"],
}
OPENINGS = ["hello", "please", "can you help", "i have a question", "good morning", "quick one", "hi there", "urgent"]
CLOSINGS = ["", "thanks", "as soon as possible", "today", "for the second time", "in the app", "for my brother", "now"]


@dataclass
class DataArguments:
    """This program's arguments in addition to TrainingArguments."""

    sequence_length: int = 24
    upload: str = ""  # gs://bucket/folder: the finished model is copied there


def sentences() -> Dataset:
    """Returns every opening, text and closing with its intent, shuffled. Put `datasets.load_dataset(...)` here."""
    rows = [
        {"text": f"{opening} {text} {closing}".strip(), "label": label}
        for label, texts in enumerate(INTENTS.values())
        for opening, text, closing in itertools.product(OPENINGS, texts, CLOSINGS)
    ]
    return Dataset.from_list(rows).shuffle(seed=0)


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a vocabulary of the words in `texts`, with BERT's special tokens."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=list(names.values())))
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, words.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def upload(folder: Path, url: str) -> None:
    """Copies the files of `folder` to a bucket."""
    from google.cloud import storage

    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    client = storage.Client()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            client.bucket(bucket).blob(f"{prefix}/{file.name}").upload_from_filename(str(file))


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, DataArguments))
    training, data = parser.parse_args_into_dataclasses()
    set_seed(training.seed)

    rows = sentences()
    tokenizer = word_tokenizer(rows["text"])

    def encode(batch: dict) -> dict:
        # One shape for every batch: on a TPU each new shape causes a compilation.
        return tokenizer(batch["text"], padding="max_length", truncation=True, max_length=data.sequence_length)

    encoded = rows.map(encode, batched=True, remove_columns=["text"]).train_test_split(test_size=128, seed=0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=data.sequence_length,
            num_labels=len(INTENTS),
            id2label=dict(enumerate(INTENTS)),
        )
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded["train"],
        eval_dataset=encoded["test"],
        processing_class=tokenizer,
        compute_metrics=lambda result: {"accuracy": float(np.mean(result[0].argmax(-1) == result[1]))},
    )
    result = trainer.train()
    figures = trainer.evaluate()
    trainer.save_model()  # process 0 writes
    print(
        f"process {training.process_index} of {training.world_size} on {training.device}: "
        f"loss {result.training_loss:.6f}, evaluation loss {figures['eval_loss']:.6f}, "
        f"accuracy {figures['eval_accuracy']:.3f}",
        flush=True,
    )
    if data.upload and trainer.is_world_process_zero():
        upload(Path(training.output_dir), data.upload)
        print(f"the model is in {data.upload}", flush=True)


if __name__ == "__main__":
    main()
