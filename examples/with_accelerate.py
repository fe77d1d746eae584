"""Train on several processes with Accelerate.

accelerate launch --num_processes 2 examples/with_accelerate.py vi out
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import IVON, SGLD, bayesify, fit_laplace, param_groups, penalty, predict, save

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("method", help="such as vi, mc_dropout, la, sgld or ivon")
parser.add_argument("folder", help="where the posterior is saved")
METHOD, FOLDER = vars(parser.parse_args()).values()
OPTIMIZERS = {"sgld": SGLD, "ivon": IVON}  # the other methods take any of torch.optim
accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
x = torch.randn(512, 8)
items = TensorDataset(x, (x[:, :4].sum(1) > 0).long())

model = bayesify(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)), METHOD)  # first, before prepare
groups = param_groups(model, lr=0.1)
optimizer = OPTIMIZERS[METHOD](model, groups, num_data=512) if METHOD in OPTIMIZERS else torch.optim.SGD(groups)
train, test = DataLoader(items, batch_size=32, shuffle=True), DataLoader(items, batch_size=64)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
for _ in range(5):
    for inputs, labels in train:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels) + penalty(model, num_data=512))
        optimizer.step()
if METHOD == "la":
    fit_laplace(model, train)  # sums over the processes
out = predict(model, test)  # every process gets all 512 predictions, in order
if accelerator.is_main_process:
    print(out)
    save(model, FOLDER)
accelerator.wait_for_everyone()
