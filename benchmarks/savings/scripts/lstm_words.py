"""An LSTM over words, whose gradients are set to zero and kept."""

import torch
from switches import adam, applied, micro_batches, precision, token_loss
from torch import nn

args = applied(batch=32, seq=128)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(33000, 512), nn.LSTM(512, 1024, num_layers=2, batch_first=True)
        self.head = nn.Linear(1024, 33000)

    def forward(self, ids):
        return self.rnn(self.embed(ids))[0]


model = Words().cuda()
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    ids = torch.randint(0, 33000, (args.batch, args.seq)).cuda()
    for (part,) in micro_batches(args.apply, ids):
        with precision(args.apply):
            loss = token_loss(model.head, model(part), part, args.apply)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=args.apply == "free-gradients")
