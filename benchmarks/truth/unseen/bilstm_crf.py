import argparse
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

# NER tagger, char-CNN + BiLSTM + CRF
START, STOP = 0, 1


def log_sum_exp(x, dim):
    m = x.max(dim)[0]
    return m + torch.log(torch.sum(torch.exp(x - m.unsqueeze(dim)), dim))


class BiLSTM_CRF(nn.Module):
    def __init__(self, vocab, tags, emb=300, hid=1024, layers=2, rnn="lstm"):
        super().__init__()
        self.word = nn.Embedding(vocab, emb)
        self.char = nn.Embedding(128, 50)
        self.charconv = nn.Conv1d(50, 100, 3, padding=1)
        cls = {"lstm": nn.LSTM, "gru": nn.GRU}[rnn]
        self.rnn = cls(emb + 100, hid // 2, num_layers=layers, bidirectional=True, batch_first=True, dropout=0.3)
        self.fc = nn.Linear(hid, tags)
        self.trans = nn.Parameter(torch.randn(tags, tags))
        self.tags = tags

    def emissions(self, w, c, lens):
        B, T, C = c.shape
        ch = self.charconv(self.char(c.view(B * T, C)).transpose(1, 2)).max(-1)[0].view(B, T, -1)
        x = pack_padded_sequence(torch.cat([self.word(w), ch], -1), lens, batch_first=True, enforce_sorted=False)
        h, _ = self.rnn(x)
        h, _ = pad_packed_sequence(h, batch_first=True)
        return self.fc(torch.relu(h))

    def partition(self, e, mask):
        score = e[:, 0] + self.trans[START]
        for t in range(1, e.shape[1]):
            nxt = log_sum_exp(score.unsqueeze(2) + self.trans.unsqueeze(0) + e[:, t].unsqueeze(1), 1)
            score = torch.where(mask[:, t].unsqueeze(1), nxt, score)
        return log_sum_exp(score + self.trans[:, STOP], 1)

    def gold(self, e, y, mask):
        s = e[:, 0].gather(1, y[:, :1]).squeeze(1) + self.trans[START, y[:, 0]]
        for t in range(1, e.shape[1]):
            s = s + (self.trans[y[:, t - 1], y[:, t]] + e[:, t].gather(1, y[:, t : t + 1]).squeeze(1)) * mask[:, t]
        return s

    @torch.no_grad()
    def viterbi(self, e):
        score, back = e[:, 0], []
        for t in range(1, e.shape[1]):
            best, idx = (score.unsqueeze(2) + self.trans).max(1)
            score = best + e[:, t]
            back.append(idx)
        path = [score.argmax(1)]
        for idx in reversed(back):
            path.append(idx.gather(1, path[-1].unsqueeze(1)).squeeze(1))
        return torch.stack(path[::-1], 1)


parser = argparse.ArgumentParser()
parser.add_argument("--rnn", default="lstm")
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--max-len", type=int, default=120)
parser.add_argument("--hid", type=int, default=1024)
opt = parser.parse_args()
torch.manual_seed(8)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = BiLSTM_CRF(50000, 20, hid=opt.hid, rnn=opt.rnn).to(device)
optim = torch.optim.Adadelta(model.parameters(), lr=1.0)
total_loss = 0
for i in range(4):
    lens = torch.randint(5, opt.max_len, (opt.batch,))
    w = pad_sequence([torch.randint(1, 50000, (n,)) for n in lens.tolist()], batch_first=True).to(device)
    c = torch.randint(0, 128, (*w.shape, 16)).to(device)
    y = torch.randint(2, 20, w.shape).to(device)
    mask = (torch.arange(w.shape[1])[None] < lens[:, None]).to(device)
    e = model.emissions(w, c, lens)
    loss = (model.partition(e, mask) - model.gold(e, y, mask)).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
    total_loss += loss  # the classic
    acc = (model.viterbi(e) == y)[mask].float().mean().item()
    print(i, tuple(w.shape), loss.item(), acc)
