"""Families of Hugging Face's that a fine-tune is tested on."""

FAMILIES = [
    *(
        "llama",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "mistral",
        "phi3",
        "olmo2",
        "gpt_neox",
        "gpt2",
        "mixtral",
        "qwen3_moe",
    ),
]
OVERRIDES = "num_hidden_layers=2,hidden_size=64"
