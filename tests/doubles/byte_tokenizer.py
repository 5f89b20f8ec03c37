"""A tokenizer whose ids 0..255 are the bytes themselves, and 256 is EOS. Fits `scripted_runner`."""

import tokenizers

from penstock.text.tokenizer import Decoding, Tokenizer, byte_level_bytes


def byte_tokenizer() -> Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    return Tokenizer(library, decoding=Decoding(byte_level_bytes), eos_ids=(256,))
