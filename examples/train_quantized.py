"""Quantization-aware training (QAT) in plain NumPy: a small network with 3-bit weights and 8-bit activations.

Weight scales are learned (LSQ); the hidden activation has an EMA range. The script compares three networks on held-out
data: the float network, the float network quantized after training (PTQ), and the network trained with quantization
(QAT).
"""

from dataclasses import dataclass, field

import numpy as np

import detent as dt

HIDDEN, STEPS, BATCH, LEARNING_RATE = 32, 800, 64, 0.1


@dataclass
class Network:
    """y = relu(x @ w1 + b) @ w2, with fake quantization of both weights and of the hidden activation."""

    w1: np.ndarray
    bias: np.ndarray
    w2: np.ndarray
    q1: dt.FakeQuantize = field(default_factory=lambda: dt.FakeQuantize("int3/axis1", mode=dt.Learned()))
    q2: dt.FakeQuantize = field(default_factory=lambda: dt.FakeQuantize("int3", mode=dt.Learned()))
    qh: dt.FakeQuantize = field(default_factory=lambda: dt.FakeQuantize("uint8", mode=dt.EMA(decay=0.95)))

    def quantizers(self) -> tuple[dt.FakeQuantize, ...]:
        """All three quantizers, in a fixed order."""
        return self.q1, self.q2, self.qh

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the quantized hidden activation, the quantized second weight, and the output."""
        hidden = self.qh(np.maximum(x @ self.q1(self.w1) + self.bias, 0))
        w2 = self.q2(self.w2)
        return hidden, w2, hidden @ w2

    def train_step(self, x: np.ndarray, target: np.ndarray) -> None:
        """Take one step of gradient descent; each backward uses the parameters of the preceding forward."""
        hidden, w2, y = self.forward(x)
        gy = 2 * (y - target) / np.float32(len(x))
        g_hidden = self.qh.backward(gy @ w2.T) * (hidden > 0)
        self.w2 -= LEARNING_RATE * self.q2.backward(hidden.T @ gy)
        self.w1 -= LEARNING_RATE * self.q1.backward(x.T @ g_hidden)
        self.bias -= LEARNING_RATE * g_hidden.sum(axis=0)
        for quantizer in (self.q1, self.q2):
            if quantizer.enabled:  # update the learned scale, which must stay positive
                scale = quantizer.scale - np.float32(LEARNING_RATE) * quantizer.scale_grad
                quantizer.update_params(np.maximum(scale, np.float32(1e-4)))

    def loss(self, x: np.ndarray, target: np.ndarray) -> float:
        """The mean squared error."""
        return dt.metrics.mse(self.forward(x)[-1], target)


def data(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.uniform(-1, 1, size=(count, 2)).astype(np.float32)
    return x, (np.sin(3 * x[:, :1]) * x[:, 1:]).astype(np.float32)


def train(*, quantized: bool) -> Network:
    rng = np.random.default_rng(0)
    net = Network(
        w1=rng.normal(size=(2, HIDDEN)).astype(np.float32),
        bias=np.zeros(HIDDEN, np.float32),
        w2=(0.3 * rng.normal(size=(HIDDEN, 1))).astype(np.float32),
    )
    for quantizer in net.quantizers():
        quantizer.enabled = quantized
    for _ in range(STEPS):
        net.train_step(*data(rng, BATCH))
    return net


def main() -> None:
    test_data = data(np.random.default_rng(1), 2000)
    net = train(quantized=False)
    float_loss = net.loss(*test_data)

    for quantizer in net.quantizers():
        quantizer.enabled = True
    net.forward(data(np.random.default_rng(2), 2000)[0])  # calibration: the first batch sets the parameters
    for quantizer in net.quantizers():
        quantizer.eval()
    ptq_loss = net.loss(*test_data)

    trained = train(quantized=True)
    states = [quantizer.eval().state_dict() for quantizer in trained.quantizers()]
    qat_loss = trained.loss(*test_data)

    # A new quantizer with a loaded state dict gives the same bits.
    restored = Network(trained.w1, trained.bias, trained.w2)
    for quantizer, state in zip(restored.quantizers(), states, strict=True):
        quantizer.load_state_dict(state).eval()
    assert restored.loss(*test_data) == qat_loss
    assert float_loss < qat_loss < ptq_loss

    print(f"mean squared error on held-out data, {STEPS} steps each")
    print(f"  float32                        {float_loss:.5f}")
    print(f"  3-bit weights, PTQ             {ptq_loss:.5f}")
    print(f"  3-bit weights, QAT             {qat_loss:.5f}")


if __name__ == "__main__":
    main()
