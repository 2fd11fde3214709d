"""Units and large numbers in words, as answers have them."""

from typing import Final

_NAMES: Final = """
    % percent percentage pct
    dollar $ dollars usd
    cent cents
    euro € euros eur
    pound £ pounds gbp
    yen ¥ jpy
    degree ° degrees deg
    km kilometer kilometers kilometre kilometres
    m meter meters metre metres
    cm centimeter centimeters centimetre centimetres
    mm millimeter millimeters millimetre millimetres
    mile miles mi
    foot feet ft
    inch inches
    yard yards yd
    kg kilogram kilograms kilo kilos
    g gram grams
    mg milligram milligrams
    ton tons tonne tonnes
    lb lbs
    ounce ounces oz
    l L liter liters litre litres
    ml mL milliliter milliliters millilitre millilitres
    s second seconds sec secs
    ms millisecond milliseconds
    min minute minutes mins
    h hour hours hr hrs
    day days
    week weeks
    month months
    year years yr yrs
    mph
    kmh kph
    N newton newtons
    J joule joules
    kJ kilojoule kilojoules
    W watt watts
    kW kilowatt kilowatts
    V volt volts
    A ampere amperes amp amps
    Hz hertz
    kHz
    MHz
    Pa pascal pascals
    K kelvin
    C celsius
    F fahrenheit
"""
"""A unit a line, in all its spellings. Abbreviations of one letter are read as they are written, words in any
case. A pound is money or a weight: only ``lb`` is known as a weight."""

_UNITS: Final = {name: line.split()[0] for line in _NAMES.strip().splitlines() for name in line.split()}

SCALES: Final = {
    "hundred": 2,
    "thousand": 3,
    "k": 3,
    "million": 6,
    "M": 6,
    "mn": 6,
    "billion": 9,
    "bn": 9,
    "B": 9,
    "trillion": 12,
}
"""Word after a number -> the power of ten that it stands for."""


def unit_of(word: str) -> str:
    """Return a unit in its first spelling; empty: the word is not known as one."""
    return _UNITS.get(word) or (_UNITS.get(word.lower(), "") if len(word) > 2 else "")
