"""Fine-tunes BERT to name the intent of a sentence, with its own training loop and Hugging Face's Accelerate.

A program as it would run anywhere: nothing of tpu-launch is imported. One process for each device; Accelerate gives
each its part of the data and averages the gradients. Without --model and --data it trains a small BERT on a few
sentences; with `--model bert-base-cased --data gs://bucket/banking77` it follows the public recipe for BANKING77.

    tpu-launch run -f examples/accelerate/run.yaml         on every host of a slice
    python train.py                                        here
"""

import argparse
import csv
import io
import itertools
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

INTENTS = {
    "card": ["my card was swallowed", "a new card", "the card does not work", "block my card"],
    "transfer": ["a transfer is missing", "send money abroad", "cancel the transfer", "transfer to my savings"],
    "balance": ["what is my balance", "how much money is left", "the balance is wrong", "show the account"],
}
OPENINGS = ["hello", "please", "can you help", "i have a question", "good morning", "quick one", "hi there", "urgent"]
CLOSINGS = ["", "thanks", "as soon as possible", "today", "for the second time", "in the app", "for my brother", "now"]
Row = tuple[str, str]  # text, intent


def read(folder: str, name: str) -> list[Row]:
    """Returns the rows of a CSV file with the columns text and category, in a folder or a bucket."""
    if folder.startswith("gs://"):
        from google.cloud import storage

        bucket, _, prefix = folder.removeprefix("gs://").partition("/")
        text = storage.Client().bucket(bucket).blob(f"{prefix}/{name}").download_as_text()
    else:
        text = (Path(folder) / name).read_text(encoding="utf-8")
    return [(row["text"], row["category"]) for row in csv.DictReader(io.StringIO(text, newline=""))]


def sentences() -> tuple[list[Row], list[Row]]:
    """Returns every opening, text and closing with its intent: seven of eight for training, the others for
    evaluation."""
    rows = [
        (f"{opening} {text} {closing}".strip(), intent)
        for intent, texts in INTENTS.items()
        for opening, text, closing in itertools.product(OPENINGS, texts, CLOSINGS)
    ]
    return [row for number, row in enumerate(rows) if number % 8], rows[::8]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="folder or gs:// folder with train.csv and test.csv")
    parser.add_argument("--model", default="", help="of the Hugging Face Hub, or a folder")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a process")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--length", type=int, default=32, help="tokens of every row: one shape, one program")
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(1)
    training, test = (read(options.data, name) for name in ("train.csv", "test.csv")) if options.data else sentences()
    intents = sorted({intent for _, intent in training})
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=len(intents))
    else:
        tokenizer = word_tokenizer([text for text, _ in training])
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        model = BertForSequenceClassification(BertConfig(len(tokenizer), num_labels=len(intents), **small))

    def loader(rows: list[Row], shuffle: bool) -> DataLoader:
        texts, labels = [text for text, _ in rows], torch.tensor([intents.index(intent) for _, intent in rows])
        encoded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=options.length, return_tensors="pt"
        )
        data = TensorDataset(encoded["input_ids"], encoded["attention_mask"], labels)
        # Whole batches only: a shorter last one would be a new shape, which causes a compilation.
        return DataLoader(data, options.batch_size, shuffle=shuffle, drop_last=True)

    batches, trials = loader(training, shuffle=True), loader(test, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model, optimizer, batches, trials = accelerator.prepare(model, optimizer, batches, trials)
    # Accelerate steps a schedule once for each process, so it is made for as many steps.
    steps = options.epochs * len(batches) * accelerator.num_processes
    schedule = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, steps // 10, steps))

    for epoch in range(options.epochs):
        model.train()
        for ids, mask, labels in batches:
            value = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            accelerator.backward(value)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        for ids, mask, labels in trials:
            with torch.no_grad():
                found = model(input_ids=ids, attention_mask=mask).logits.argmax(-1)
            right.append(accelerator.gather_for_metrics(found == labels).float().cpu())
        mean = accelerator.gather(value.detach().reshape(1)).mean().item()
        print(
            f"process {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device}: "
            f"epoch {epoch + 1}, loss {mean:.6f}, accuracy {torch.cat(right).mean().item():.3f}",
            flush=True,
        )
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "/tmp/out", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )


if __name__ == "__main__":
    main()
