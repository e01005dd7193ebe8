"""Classification of sentences, by Transformers' Trainer in the shape of its run_glue.py.

    python examples/transformers_classification.py                one worker
    unisono run -n 3 examples/transformers_classification.py      three workers, the same weights to the last bit

The sentences are made up, the tokenizer is trained on them, and the model is a small BERT with random weights. Options
are those of TrainingArguments. Needs pip install '.[transformers]' in a clone.
"""

import random

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import unisono


class MyTrainer(unisono.transformers.TrainerMixin, Trainer):
    """The trainer, on any number of workers."""


WHAT = ("the film", "this long novel", "the second half", "her voice", "the orchestra", "nothing in it")
GOOD = ("delights", "moves me", "is a joy", "shines from the first minute to the last")
BAD = ("drags", "is a bore", "falls flat", "left me as cold as the hall that it was shown in")


def sentences(count):
    """Sentences, and whether they praise something."""
    draw = random.Random(0)  # noqa: S311 (sentences are no secret)
    labels = [draw.randrange(2) for _ in range(count)]
    return [(f"{draw.choice(WHAT)} {draw.choice(GOOD if label else BAD)}", label) for label in labels]


def train_tokenizer(texts):
    """A tokenizer of whole words."""
    words = Tokenizer(WordLevel(unk_token="[UNK]"))  # noqa: S106 (a word)
    words.pre_tokenizer = Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train_from_iterator(texts, WordLevelTrainer(special_tokens=special))
    words.post_processor = BertProcessing(("[SEP]", words.token_to_id("[SEP]")), ("[CLS]", words.token_to_id("[CLS]")))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=["input_ids", "attention_mask"], **names)


def main():
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="classification",
        per_device_train_batch_size=32,
        num_train_epochs=3,
        learning_rate=3e-3,
        weight_decay=0.01,
        train_sampling_strategy="group_by_length",
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
    )
    (training_args,) = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw = sentences(400)
    tokenizer = train_tokenizer(sentence for sentence, _ in raw)
    samples = [{**tokenizer(sentence), "labels": label} for sentence, label in raw]
    train_dataset, eval_dataset, predict_dataset = samples[:300], samples[300:350], samples[350:]

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,
        num_labels=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForSequenceClassification(config)

    def compute_metrics(p: EvalPrediction):
        preds = np.argmax(p.predictions, axis=1)
        return {"accuracy": float((preds == p.label_ids).mean())}

    trainer = MyTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate(eval_dataset=eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

    predictions = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
    if trainer.is_world_process_zero():
        print("predicted:", *np.argmax(predictions, axis=1))


if __name__ == "__main__":
    main()
