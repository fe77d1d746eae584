"""Fine-tune on several processes with the Trainer.

torchrun --nproc_per_node 2 examples/with_trainer.py vi out
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from bayesify import bayesify
from bayesify.integrations.huggingface import BayesTrainer, save_pretrained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("method", help="such as vi, mc_dropout, la, sgld or ivon")
parser.add_argument("folder", help="where the posterior is saved")
METHOD, FOLDER = vars(parser.parse_args()).values()
torch.manual_seed(0)
tokens = torch.randint(3, 40, (128, 6))
items = [{"input_ids": row, "labels": (row[0] > 20).long()} for row in tokens]  # your tokenized texts
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = bayesify(BertForSequenceClassification(BertConfig(vocab_size=40, **sizes)), METHOD)  # your pretrained model
args = TrainingArguments(
    FOLDER,
    num_train_epochs=6,
    learning_rate=0.01,
    per_device_train_batch_size=16,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = BayesTrainer(model, args, train_dataset=items, eval_dataset=items)
trainer.train()  # with method "la" it fits the curvature as well
scores = trainer.evaluate()
if trainer.is_world_process_zero():
    print({name: round(scores[name], 4) for name in ("eval_nll", "eval_error", "eval_ece")})
    save_pretrained(model, FOLDER)
