"""Questions about Penstock itself."""

from __future__ import annotations

from random import Random

from training.tasks.base import Exchange, Persona, ask, typed

# Each line is: answer | question | question | ...
FACTS = """\
Penstock is a serving platform for language models. It brings thousands of streaming requests to your CPUs \
and GPUs at \
just the rate they can use. | What is Penstock? | What's Penstock? | Tell me about Penstock. | Explain \
Penstock. | What is \
Penstock about? | What does Penstock do? | Describe Penstock. | Can you explain what Penstock is? | Do you \
know Penstock? \
| What is Penstock for? | Penstock? | What is this project? | Give me a short summary of Penstock.
A penstock is the pipe and gate that bring water to a turbine at just the rate it can use. Penstock does \
that for language \
models. | What does the name Penstock mean? | Why is it called Penstock? | Where does the name Penstock come \
from? | \
What is a penstock? | What does penstock mean? | Why the name Penstock? | What's a penstock?
Run `penstock serve MODEL`, where MODEL is a Hugging Face directory or hub id. | How do I serve a model? | \
How can I \
serve a model? | How do I start Penstock? | How do I run Penstock? | How do I start the server? | Which \
command serves a \
model? | What is the command to serve a model? | How do I serve a model with Penstock? | How do I use \
Penstock?
Penstock listens on port 8000, at http://127.0.0.1:8000/v1. | Which port does Penstock use? | What port does \
Penstock \
listen on? | What is the default port? | On which port is the server? | Which port is used? | What port? | \
Where does \
Penstock listen? | What is the address of the API? | What is the base URL?
Penstock is free software under the Apache-2.0 licence. | What is the licence of Penstock? | Which license \
does Penstock \
have? | Is Penstock open source? | Is Penstock free? | Under which licence is Penstock? | What license is \
Penstock under?
Penstock is written in Python. | In which language is Penstock written? | What is Penstock written in? | \
Which programming \
language does Penstock use? | Is Penstock written in Python?
Penstock is made by the Penstock project. | Who made Penstock? | Who wrote Penstock? | Who created Penstock? \
| Who is \
behind Penstock? | Who develops Penstock?
Penstock speaks the OpenAI API: chat completions, completions and embeddings under /v1, with streaming. | \
Which API does \
Penstock have? | Is Penstock compatible with OpenAI? | Can I use the OpenAI client with Penstock? | Does \
Penstock speak \
the OpenAI API? | Which API does Penstock speak? | What API do you offer?
Yes, Penstock streams tokens as server-sent events; set `"stream": true` in the request. | Does Penstock \
stream? | Can \
Penstock stream answers? | How do I stream tokens? | How do I get a streaming answer? | Does Penstock \
support streaming?
A paged KV cache keeps the keys and values of a request in small blocks, so memory is allocated as it is \
needed. | What is \
a paged KV cache? | What is paged attention? | Explain the paged KV cache. | How does the KV cache work? | \
What is the KV \
cache? | What is a KV block?
Continuous batching lets requests join and leave the batch at every step, so the device stays busy. | What \
is continuous \
batching? | Explain continuous batching. | How does continuous batching work? | What does continuous \
batching mean?
Prefix caching reuses the KV blocks of a prompt's beginning when another request shares it. | What is prefix \
caching? | \
Explain prefix caching. | How does the prefix cache work? | What does the prefix cache do? | What is a \
prefix hit?
Speculative decoding lets a small draft model propose tokens that the large model checks in one step. | What \
is \
speculative decoding? | Explain speculative decoding. | What is a draft model? | How does speculative \
decoding work?
Chunked prefill splits a long prompt over several steps, so that it does not stall other requests. | What is \
chunked \
prefill? | Explain chunked prefill. | How does chunked prefill work? | Why is prefill chunked?
TTFT is the time to first token: how long a user waits before the answer starts. | What is TTFT? | What does \
TTFT mean? | \
What does TTFT stand for? | Explain TTFT. | What is the time to first token?
TPOT is the time per output token: how fast an answer grows once it has started. | What is TPOT? | What does \
TPOT mean? | \
What does TPOT stand for? | Explain TPOT. | What is the time per output token?
A tenant is a customer of the gateway, with its own key, limits and budget. | What is a tenant? | What does \
tenant mean? | \
Explain tenants. | What are tenants in Penstock?
Prefill reads the whole prompt; decode then writes the answer token by token. | What is prefill? | What is \
decode? | What \
is the difference between prefill and decode? | Explain prefill and decode.
Requests queue, degrade or fail on purpose under overload; the system never falls over. | What happens under \
overload? | \
What happens when there are too many requests? | How does Penstock handle overload? | What if the server is \
overloaded?
Yes, Penstock runs on a CPU or a GPU. | Does Penstock need a GPU? | Can Penstock run on a CPU? | Do I need a \
GPU? | Does \
Penstock run without a GPU? | Does Penstock work on a CPU? | Can I run Penstock on my laptop?
Penstock can drive its own engine, vLLM, SGLang, TGI, Triton and any OpenAI-compatible server. | Which \
engines does \
Penstock support? | Does Penstock work with vLLM? | Which backends does Penstock have? | Can I use SGLang \
with Penstock?
The dashboard is at http://127.0.0.1:8000/. | Where is the dashboard? | Is there a dashboard? | Does \
Penstock have a \
dashboard? | How do I open the dashboard? | Where can I see the dashboard?
Penstock shows Prometheus metrics at /metrics. | Where are the metrics? | Does Penstock have metrics? | How \
do I get \
metrics? | Does Penstock support Prometheus? | How do I monitor Penstock?
Run `penstock bench` to measure throughput and latency. | How do I benchmark Penstock? | How do I run a \
benchmark? | How \
can I measure the speed? | Which command runs a benchmark?
Run `penstock chat` to talk to a model in the terminal. | How do I chat in the terminal? | How can I talk to \
the model? | \
Which command starts a chat? | How do I chat with a model?
Run `penstock simulate` to try a policy on a thousand simulated workers. | How do I run the simulator? | Is \
there a \
simulator? | How do I simulate a fleet? | What is the simulator for? | Which command starts the simulator?
Run `penstock doctor` to check the machine and the configuration. | How do I check my setup? | What does \
penstock doctor \
do? | Something is wrong, what can I do? | How do I check the configuration?
Run `penstock keys` to make and list API keys. | How do I make an API key? | How do I create a key? | How do \
I manage API \
keys? | Which command makes API keys?
Write a YAML file and run `penstock serve -c fleet.yaml`. | How do I serve a fleet? | How do I use a config \
file? | How do \
I configure Penstock? | How do I serve several models? | Where do I put the configuration?
"""

TABLE = [[part.strip() for part in line.split("|")] for line in FACTS.splitlines()]


def about(rng: Random, persona: Persona) -> Exchange:
    """A line of the table; the first, the one every visitor asks, comes more often."""
    del persona
    answer, *questions = TABLE[0] if rng.random() < 0.1 else rng.choice(TABLE)
    return ask("about", typed(rng, rng.choice(questions)), answer)
