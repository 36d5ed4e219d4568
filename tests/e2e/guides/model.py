#!/usr/bin/env python3
"""A language model of 65 MiB with random weights: as much work for each word as a real one of its size, and no sense.

Usage: model.py FILE
"""

import functools
import sys

import gguf
import numpy

LAYERS, EMBEDDING, FEED_FORWARD, HEADS = 8, 512, 2048, 8
# Bytes, after the three that the tokenizer needs.
TOKENS = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
TYPES = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]

generator = numpy.random.default_rng(0)
writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_context_length(2048)
writer.add_embedding_length(EMBEDDING)
writer.add_block_count(LAYERS)
writer.add_feed_forward_length(FEED_FORWARD)
writer.add_head_count(HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(EMBEDDING // HEADS)
writer.add_tokenizer_model("llama")
writer.add_token_list(TOKENS)
writer.add_token_scores([0.0] * len(TOKENS))
writer.add_token_types(TYPES)
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)


@functools.cache
def matrix(rows, columns):
    """The same for all of a shape, as an emulated machine takes minutes for more."""
    values = generator.standard_normal((rows, columns), dtype=numpy.float32) / numpy.sqrt(columns)
    return values.astype(numpy.float16)


def weights(name, rows, columns):
    writer.add_tensor(f"{name}.weight", matrix(rows, columns))


def norm(name):
    writer.add_tensor(f"{name}.weight", numpy.ones(EMBEDDING, dtype=numpy.float32))


weights("token_embd", len(TOKENS), EMBEDDING)
for layer in range(LAYERS):
    norm(f"blk.{layer}.attn_norm")
    for part in "q", "k", "v", "output":
        weights(f"blk.{layer}.attn_{part}", EMBEDDING, EMBEDDING)
    norm(f"blk.{layer}.ffn_norm")
    weights(f"blk.{layer}.ffn_gate", FEED_FORWARD, EMBEDDING)
    weights(f"blk.{layer}.ffn_up", FEED_FORWARD, EMBEDDING)
    weights(f"blk.{layer}.ffn_down", EMBEDDING, FEED_FORWARD)
norm("output_norm")
weights("output", len(TOKENS), EMBEDDING)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
