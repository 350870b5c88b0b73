"""Adapters that PEFT makes and writes give what PEFT computes with them."""

import numpy as np
import pytest

from jaxkv import LLM, LoRARequest, SamplingParams
from tiny import SMALL, make_checkpoint, tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("default"),  # those of PEFT's own parts are not ours
]
CASES = [
    {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 2},
        "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 11, "q_proj": 5},
    },
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["o_proj", "gate_proj"],
        "layers_to_transform": [0, 2],
    },
    {"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[01]\.mlp\.(up|down)_proj"},
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": ["layers.1.self_attn.q_proj"],
    },
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "up_proj"],
        "exclude_modules": r".*layers\.[12]\.self_attn\.k_proj",
    },
]


def test_logprobs_are_those_of_peft(tmp_path):
    torch.manual_seed(0)
    base = make_checkpoint(tmp_path / "base", tiny_config("llama"))
    prompt = np.random.default_rng(0).integers(3, 151, 20).tolist()
    requests, want = [], []
    for number, case in enumerate(CASES, 1):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:  # zero in a new adapter
                    weight.copy_(torch.randn_like(weight) * weight.shape[1] ** -0.5)
            logits = model(torch.tensor([prompt])).logits[0].double()
        want.append(torch.log_softmax(logits, -1).numpy())
        model.save_pretrained(tmp_path / str(number))
        requests.append(LoRARequest(str(number), number, tmp_path / str(number)))
    llm = LLM(base, enable_lora=True, max_loras=len(CASES), **SMALL)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=20)
    outputs = llm.generate([prompt] * len(CASES), params, lora_request=requests, use_tqdm=False)
    for output, want_TV in zip(outputs, want, strict=True):
        for of_token, entries in enumerate(output.prompt_logprobs[1:]):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(want_TV[of_token, token], abs=1e-4)
