"""Capitals and simple facts, each in several phrasings."""

from __future__ import annotations

from random import Random

from training.tasks.base import Exchange, Persona, ask, typed

COUNTRIES = (
    "France:Paris;Germany:Berlin;Italy:Rome;Spain:Madrid;Portugal:Lisbon;Austria:Vienna;Switzerland:Bern;"
    "Belgium:Brussels;the Netherlands:Amsterdam;Denmark:Copenhagen;Norway:Oslo;Sweden:Stockholm;"
    "Finland:Helsinki;Iceland:Reykjavik;Ireland:Dublin;the United Kingdom:London;Poland:Warsaw;"
    "the Czech Republic:Prague;Slovakia:Bratislava;Hungary:Budapest;Romania:Bucharest;Bulgaria:Sofia;"
    "Greece:Athens;Turkey:Ankara;Ukraine:Kyiv;Croatia:Zagreb;Serbia:Belgrade;Slovenia:Ljubljana;"
    "Estonia:Tallinn;Latvia:Riga;Lithuania:Vilnius;Japan:Tokyo;China:Beijing;India:New Delhi;"
    "South Korea:Seoul;Thailand:Bangkok;Vietnam:Hanoi;Indonesia:Jakarta;Malaysia:Kuala Lumpur;"
    "the Philippines:Manila;Nepal:Kathmandu;Pakistan:Islamabad;Iran:Tehran;Iraq:Baghdad;"
    "Saudi Arabia:Riyadh;Jordan:Amman;Lebanon:Beirut;Egypt:Cairo;Morocco:Rabat;Tunisia:Tunis;"
    "Algeria:Algiers;Kenya:Nairobi;Ethiopia:Addis Ababa;Nigeria:Abuja;Ghana:Accra;Senegal:Dakar;"
    "Canada:Ottawa;the United States:Washington, D.C.;Mexico:Mexico City;Cuba:Havana;Brazil:Brasilia;"
    "Argentina:Buenos Aires;Chile:Santiago;Peru:Lima;Colombia:Bogota;Uruguay:Montevideo;"
    "Venezuela:Caracas;Australia:Canberra;New Zealand:Wellington"
)
PAIRS = [pair.partition(":") for pair in COUNTRIES.split(";")]
CAPITALS: dict[str, str] = {country: city for country, _, city in PAIRS}
OTHER_NAMES = {"the United Kingdom": ("the UK", "Great Britain"), "the United States": ("the USA", "the US")}

CAPITAL_QUESTIONS = (
    "What is the capital of {}?", "What's the capital of {}?", "Which city is the capital of {}?",
    "Name the capital of {}.", "Tell me the capital of {}.", "Capital of {}?", ("What is the capital city of "
    "{}?"),
    "Do you know the capital of {}?", "What is the name of the capital of {}?", "The capital of {} is?",
    "I need the capital of {}.", "Give me the capital of {}.", "Which city is {}'s capital?",
    "What city is the capital of {}?",
)  # fmt: skip
COUNTRY_QUESTIONS = (
    "{} is the capital of which country?", "Which country has the capital {}?", ("What country is {} the "
    "capital of?"),
    "Of which country is {} the capital?", "Which country's capital is {}?",
)  # fmt: skip

# Each line is: answer | question | question | ...
FACTS = """\
The sky is blue. | What colour is the sky? | What color is the sky? | Which colour has the sky?
Grass is green. | What colour is grass? | What color is grass? | Which colour does grass have?
Snow is white. | What colour is snow? | What color is snow? | Which colour does snow have?
A ripe banana is yellow. | What colour is a banana? | What color is a ripe banana? | Which colour are bananas?
A week has 7 days. | How many days are in a week? | How many days does a week have? | How long is a week in \
days?
A year has 12 months. | How many months are in a year? | How many months does a year have?
A year has 365 days, a leap year 366. | How many days are in a year? | How many days does a year have?
A day has 24 hours. | How many hours are in a day? | How many hours does a day have?
An hour has 60 minutes. | How many minutes are in an hour? | How many minutes does an hour have?
A minute has 60 seconds. | How many seconds are in a minute? | How many seconds does a minute have?
A spider has 8 legs. | How many legs does a spider have? | How many legs do spiders have?
An insect has 6 legs. | How many legs does an insect have? | How many legs do insects have?
A dog has 4 legs. | How many legs does a dog have? | How many legs do dogs have?
A triangle has 3 sides. | How many sides does a triangle have? | How many sides are there in a triangle?
A square has 4 sides. | How many sides does a square have? | How many sides are there in a square?
A hexagon has 6 sides. | How many sides does a hexagon have? | How many sides are there in a hexagon?
There are 7 continents. | How many continents are there? | How many continents does the world have?
Asia is the largest continent. | What is the largest continent? | Which continent is the biggest?
The Pacific is the largest ocean. | What is the largest ocean? | Which ocean is the biggest?
The blue whale is the largest animal. | What is the largest animal? | Which animal is the biggest?
The cheetah is the fastest land animal. | What is the fastest land animal? | Which animal runs fastest?
Mount Everest is the highest mountain. | What is the highest mountain? | What is the tallest mountain on \
Earth?
Jupiter is the largest planet of our solar system. | What is the largest planet? | Which planet is the \
biggest?
Mercury is the planet closest to the Sun. | Which planet is closest to the Sun? | What is the first planet?
Mars is called the red planet. | Which planet is called the red planet? | What is the red planet?
There are 8 planets in our solar system. | How many planets are there? | How many planets circle the Sun?
The Earth goes around the Sun. | Does the Earth go around the Sun? | What does the Earth go around?
The Moon goes around the Earth. | What goes around the Earth? | What does the Moon go around?
Water freezes at 0 °C. | At what temperature does water freeze? | When does water freeze?
Water boils at 100 °C. | At what temperature does water boil? | When does water boil?
Water is made of hydrogen and oxygen. | What is water made of? | Which elements make up water?
The chemical formula of water is H2O. | What is the chemical formula of water? | What is the formula for \
water?
The chemical symbol of gold is Au. | What is the chemical symbol of gold? | What is the symbol for gold?
The chemical symbol of iron is Fe. | What is the chemical symbol of iron? | What is the symbol for iron?
The chemical symbol of silver is Ag. | What is the chemical symbol of silver? | What is the symbol for silver?
The chemical symbol of oxygen is O. | What is the chemical symbol of oxygen? | What is the symbol for oxygen?
The chemical symbol of carbon is C. | What is the chemical symbol of carbon? | What is the symbol for carbon?
The first month is January. | What is the first month of the year? | Which month comes first?
The last month is December. | What is the last month of the year? | Which month comes last?
Bees make honey. | Who makes honey? | Which animal makes honey? | What do bees make?
Cows give milk. | Which animal gives milk? | Where does milk come from? | What do cows give?
The opposite of hot is cold. | What is the opposite of hot? | What's the opposite of hot? | Opposite of hot?
The opposite of big is small. | What is the opposite of big? | What's the opposite of big? | Opposite of big?
The opposite of day is night. | What is the opposite of day? | What's the opposite of day? | Opposite of day?
The opposite of up is down. | What is the opposite of up? | What's the opposite of up? | Opposite of up?
The opposite of fast is slow. | What is the opposite of fast? | What's the opposite of fast? | Opposite of \
fast?
The opposite of open is closed. | What is the opposite of open? | What's the opposite of open? | Opposite of \
open?
The Nile flows through Egypt. | Which river flows through Egypt? | What river is in Egypt?
The Seine flows through Paris. | Which river flows through Paris? | What river is in Paris?
The Thames flows through London. | Which river flows through London? | What river is in London?
Romeo and Juliet was written by William Shakespeare. | Who wrote Romeo and Juliet? | Who is the author of \
Romeo and Juliet?
Python was created by Guido van Rossum. | Who created Python? | Who made the Python language?
HTTP stands for Hypertext Transfer Protocol. | What does HTTP stand for? | What is HTTP short for?
JSON stands for JavaScript Object Notation. | What does JSON stand for? | What is JSON short for?
CPU stands for central processing unit. | What does CPU stand for? | What is a CPU?
GPU stands for graphics processing unit. | What does GPU stand for? | What is a GPU?
LLM stands for large language model. | What does LLM stand for? | What is an LLM?
API stands for application programming interface. | What does API stand for? | What is an API?
A byte has 8 bits. | How many bits are in a byte? | How many bits does a byte have?
In France people speak French. | What language do people speak in France? | Which language is spoken in \
France?
In Germany people speak German. | What language do people speak in Germany? | Which language is spoken in \
Germany?
In Spain people speak Spanish. | What language do people speak in Spain? | Which language is spoken in Spain?
In Italy people speak Italian. | What language do people speak in Italy? | Which language is spoken in Italy?
In Japan people speak Japanese. | What language do people speak in Japan? | Which language is spoken in Japan?
In Brazil people speak Portuguese. | What language do people speak in Brazil? | Which language is spoken in \
Brazil?
"""

TABLE = [[part.strip() for part in line.split("|")] for line in FACTS.splitlines()]


def facts(rng: Random, persona: Persona) -> Exchange:
    """A capital, a capital's country, or a line of the table."""
    del persona
    draw = rng.random()
    if draw < 0.5:
        country = rng.choice(list(CAPITALS))
        name = rng.choice((country, *OTHER_NAMES.get(country, ())))
        question = rng.choice(CAPITAL_QUESTIONS).format(name)
        return ask(
            "facts",
            typed(rng, sentence(question)),
            sentence(f"The capital of {country} is {CAPITALS[country]}."),
        )
    if draw < 0.6:
        country, capital = rng.choice(list(CAPITALS.items()))
        question = rng.choice(COUNTRY_QUESTIONS).format(capital)
        return ask(
            "facts", typed(rng, question), f"{capital} is the capital of {country}.".replace("..", ".")
        )
    answer, *questions = rng.choice(TABLE)
    return ask("facts", typed(rng, rng.choice(questions)), answer)


def sentence(text: str) -> str:
    """`text` without the double full stop that an abbreviation at its end leaves."""
    return text.replace("D.C..", "D.C.")
