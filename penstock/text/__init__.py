"""Between text and token ids: tokenizer, chat template, incremental detokenizing, stop strings, tool
calls.
"""
