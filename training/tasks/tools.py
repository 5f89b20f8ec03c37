"""Tool use: choose one of the given tools, fill its arguments, and answer from a tool's response."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.chat import Message, tool_call
from training.tasks.base import Exchange, Persona, opened
from training.tasks.words import CITIES, NAMES, WEEKDAYS, WORDS

Values = dict[str, Any]
STRING, INTEGER = "string", "integer"


@dataclass(frozen=True)
class Tool:
    """A family of tools: the names it goes by, its arguments, how people ask, and what it returns."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str, str], ...]  # (names, JSON type, description)
    questions: tuple[str, ...]
    values: Callable[[Random], Values]  # Keyed by each parameter's first name.
    respond: Callable[[Random, Values], tuple[Values, str]]  # The tool's output, and the answer in words.


def _weather(rng: Random, values: Values) -> tuple[Values, str]:
    degrees, sky = (
        rng.randint(-9, 38),
        rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy", "clear", "foggy")),
    )
    key = rng.choice(("temperature", "temperature_c", "temp"))
    return {key: degrees, "conditions": sky}, f"The weather in {values['city']} is {sky}, {degrees} °C."


def _time(rng: Random, values: Values) -> tuple[Values, str]:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return {"time": clock}, f"It is {clock} in {values['city']}."


def _price(rng: Random, values: Values) -> tuple[Values, str]:
    price = rng.randint(2, 900)
    return {"price": price}, f"The price of {values['symbol']} is {price} dollars."


def _done(text: str) -> Callable[[Random, Values], tuple[Values, str]]:
    def respond(rng: Random, values: Values) -> tuple[Values, str]:
        return {rng.choice(("status", "result")): rng.choice(("ok", "done", "success"))}, text.format(
            **values
        )

    return respond


def _results(rng: Random, values: Values) -> tuple[Values, str]:
    count = rng.randint(2, 99)
    return {"count": count}, f"I found {count} results for {values['query']}."


def _sum(rng: Random, values: Values) -> tuple[Values, str]:
    del rng
    a, b = (int(part) for part in values["expression"].split(" + "))
    return {"result": a + b}, f"The result is {a + b}."


def _two_words(rng: Random) -> str:
    return " ".join(rng.sample(WORDS, 2))


CITY = (("city", "location", "place"), STRING, "The city")
TOOLS = (
    Tool(("get_weather", "weather", "current_weather", "get_current_weather"),
         ("Get the current weather in a city", "Get the weather for a place", ("Current weather of a "
         "city")), (CITY,),
         ("What is the weather in {city}?", "How is the weather in {city}?", ("What's the weather like in "
         "{city}?"),
          "Weather in {city}?", "Is it raining in {city}?", "Tell me the weather in {city}.", ("How warm is "
          "it in {city}?"),
          "What is the weather like in {city} today?", "What is the temperature in {city}?", ("Do I need a "
          "coat in {city}?")),
         lambda rng: {"city": rng.choice(CITIES)}, _weather),
    Tool(("get_time", "current_time", "get_current_time", "clock"),
        ("Get the current time in a city", ("Local time of "
    "a city")),
         (CITY,), ("What time is it in {city}?", "Tell me the time in {city}.", "What is the time in {city}?",
                   "What is the local time in {city}?", "How late is it in {city}?"),
         lambda rng: {"city": rng.choice(CITIES)}, _time),
    Tool(("get_stock_price", "stock_price", "lookup_stock"), ("Get the price of a stock", ("Look up a stock "
    "price")),
         ((("symbol", "ticker"), STRING, "The stock symbol"),),
         ("What is the price of {symbol} stock?", "How much is {symbol} stock?", ("What does a share of "
         "{symbol} cost?"),
          "Look up the stock price of {symbol}.", "Get me the stock price of {symbol}."),
         lambda rng: {"symbol": "".join(rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", rng.randint(3, 4)))},
         _price),
    Tool(("send_message", "send_sms", "message"), ("Send a text message to a person", ("Send a message to "
    "somebody")),
         ((("to", "recipient"), STRING, "Who gets it"), (("text", "body"), STRING, "What to send")),
         ("Send {to} a message: {text}", "Send a message to {to} that says {text}", "Text {to}: {text}",
          "Tell {to} by message: {text}", "Message {to}: {text}"),
         lambda rng: {"to": rng.choice(NAMES), "text": _two_words(rng)}, _done("I sent the message to "
         "{to}.")),
    Tool(("set_alarm", "create_alarm", "alarm"), ("Set an alarm", "Set an alarm for a time of day"),
         ((("time", "at"), STRING, "The time, HH:MM"),),
         ("Set an alarm for {time}.", "Wake me up at {time}.", "Wake me at {time}.", ("I need an alarm at "
         "{time}."),
          "Please set an alarm at {time}."),
         lambda rng: {"time": f"{rng.randint(4, 22)}:{rng.choice(('00', '15', '30', '45'))}"},
         _done("The alarm is set for {time}.")),
    Tool(("set_timer", "start_timer", "timer"), ("Start a timer", "Start a timer of some minutes"),
         ((("minutes", "duration"), INTEGER, "Length in minutes"),),
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", ("Timer for {minutes} "
         "minutes, please."),
          "Start a {minutes} minute timer.", "Remind me in {minutes} minutes."),
         lambda rng: {"minutes": rng.randint(2, 90)}, _done("The timer runs for {minutes} minutes.")),
    Tool(("search", "web_search", "search_web"), ("Search the web", "Find pages on the web"),
         ((("query", "q"), STRING, "What to look for"),),
         ("Search the web for {query}.", "Look up {query} on the web.", "Find pages about {query}.",
         "Search for {query}.",
          "Google {query}."),
         lambda rng: {"query": _two_words(rng)}, _results),
    Tool(("calculate", "calculator", "evaluate"), ("Evaluate an arithmetic expression", ("Calculate an "
    "expression")),
         ((("expression", "expr"), STRING, "The expression"),),
         ("Calculate {expression}.", "What is {expression}?", "Use the calculator for {expression}.",
         "Compute {expression}."), lambda rng: {"expression": f"{rng.randint(100, 9999)} + "
         f"{rng.randint(100, 9999)}"}, _sum),
    Tool(("book_table", "reserve_table", "book_restaurant"),
        ("Book a table at a restaurant", ("Reserve a restaurant "
    "table")),
         ((("people", "guests"), INTEGER, "How many people"), (("day", "date"), STRING, "The day")),
         ("Book a table for {people} people on {day}.", "Reserve a table for {people} on {day}.",
          "I need a table for {people} people on {day}.", "We are {people}, book us a table on {day}."),
         lambda rng: {"people": rng.randint(2, 12), "day": rng.choice(WEEKDAYS)},
         _done("The table for {people} on {day} is booked.")),
    Tool(("book_flight", "find_flight", "search_flights"),
        ("Book a flight between two cities", "Find a flight"),
         ((("from", "origin"), STRING, "Start"), (("to", "destination"), STRING, "End")),
         ("Book a flight from {from} to {to}.", "I want to fly from {from} to {to}.", ("Find a flight from "
         "{from} to {to}."),
          "Get me a flight to {to} from {from}."),
         lambda rng: dict(zip(("from", "to"), rng.sample(CITIES, 2), strict=True)),
         _done("The flight from {from} to {to} is ready.")),
    Tool(("play_music", "play_song", "play"), ("Play music", "Play a song"),
        ((("title", "song"), STRING, "The song"),),
         ("Play {title}.", "Play the song {title}.", "I want to hear {title}.", "Put on {title}, please."),
         lambda rng: {"title": _two_words(rng)}, _done("I am playing {title}.")),
    Tool(("turn_on_light", "switch_light_on", "light_on"), ("Turn on the light in a room", ("Switch on a "
    "light")),
         ((("room", "where"), STRING, "The room"),),
         ("Turn on the light in the {room}.", "Switch on the {room} light.", "Light on in the {room}.",
          "It is dark in the {room}."),
         lambda rng: {"room": rng.choice(("kitchen", "bedroom", "bathroom", "hall", "garage", "office",
             "garden"))},
         _done("The light in the {room} is on.")),
)  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """One tool of a family with its names fixed: the JSON schema and the arguments' names."""

    tool: Tool
    schema: dict[str, Any]
    argument_names: dict[str, str]


def choose_names(rng: Random, tool: Tool) -> Chosen:
    """Draw a tool's name, description and parameter names; schemas differ in detail as people's do."""
    names: dict[str, str] = {}
    properties: dict[str, Any] = {}
    described = rng.random() < 0.5
    for aliases, kind, description in tool.parameters:
        name = aliases[0] if rng.random() < 0.6 else rng.choice(aliases)
        names[aliases[0]] = name
        properties[name] = {"type": kind} | ({"description": description} if described else {})
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = list(properties)
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    description = rng.choice(tool.descriptions) + rng.choice(("", ".", "."))
    schema = {"name": rng.choice(tool.names), "description": description, "parameters": parameters}
    return Chosen(tool, schema, names)


def offer(rng: Random) -> tuple[Chosen, tuple[dict[str, Any], ...]]:
    """The tool that will be needed and all tools on offer, one to four, in any order."""
    drawn = [choose_names(rng, tool) for tool in rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))]
    needed = drawn[0]
    rng.shuffle(drawn)
    return needed, tuple(chosen.schema for chosen in drawn)


def request(rng: Random) -> tuple[Chosen, tuple[dict[str, Any], ...], Values, Message, Message]:
    """A user's request and the assistant's tool call for it."""
    needed, schemas = offer(rng)
    values = needed.tool.values(rng)
    question = opened(rng, rng.choice(needed.tool.questions).format(**values))
    if rng.random() < 0.15:
        question = question.rstrip("?.")
    arguments = {needed.argument_names[name]: values[name] for name in needed.argument_names}
    call = Message("assistant", tool_call(needed.schema["name"], arguments))
    return needed, schemas, values, Message("user", question), call


def tool_call_task(rng: Random, persona: Persona) -> Exchange:
    """Choose the tool and fill its arguments."""
    del persona
    _, schemas, _, user, call = request(rng)
    return Exchange("tool_call", (user, call), schemas)


def tool_answer(rng: Random, persona: Persona) -> Exchange:
    """After the tool's response, say it in words."""
    del persona
    needed, schemas, values, user, call = request(rng)
    output, answer = needed.tool.respond(rng, values)
    response = Message("tool", json.dumps(output))
    return Exchange("tool_answer", (user, call, response, Message("assistant", answer)), schemas)
