"""Train on several processes with Lightning, which starts them.

python examples/with_lightning.py vi out
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import IVON, SGLD, bayesify, fit_laplace, param_groups, penalty, predict, save

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("method", help="such as vi, mc_dropout, la, sgld or ivon")
parser.add_argument("folder", help="where the posterior is saved")
METHOD, FOLDER = vars(parser.parse_args()).values()
OPTIMIZERS = {"sgld": SGLD, "ivon": IVON}  # the other methods take any of torch.optim


class Classifier(lightning.LightningModule):
    """A model, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.model = bayesify(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)), METHOD)

    def training_step(self, batch, index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.model(inputs), labels) + penalty(self.model, num_data=512)

    def configure_optimizers(self):
        groups = param_groups(self.model, lr=0.1)
        return OPTIMIZERS[METHOD](self, groups, num_data=512) if METHOD in OPTIMIZERS else torch.optim.SGD(groups)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    items = TensorDataset(x, (x[:, :4].sum(1) > 0).long())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", devices=2, default_root_dir=FOLDER, **quiet)
    trainer.fit(Classifier(), DataLoader(items, batch_size=32, shuffle=True))
    model = trainer.lightning_module.model
    if METHOD == "la":
        fit_laplace(model, trainer.train_dataloader)  # sums over the processes
    out = predict(model, [items[:]])
    if trainer.is_global_zero:
        print(out)
        save(model, FOLDER)
