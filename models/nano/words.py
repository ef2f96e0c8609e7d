"""Word lists. Each list has a part that training sees and a part that only the held-out set uses."""

import zlib


def _split(text):
    return [w.replace("_", " ") for w in text.split()]


def _pair(train, held):
    return _split(train), _split(held)


LISTS = {
    "name": _pair(
        """Anna Ben Clara David Ella Finn Grace Henry Ivy Jack Kate Leo Mia Noah Olive Peter Quinn Rosa Sam Tina Uma
        Victor Wendy Xander Yara Zoe Tom Tim Lily Lucy Max Emma Oscar Nina Paul Ruth Simon Tara Adam Bella Carl Dora
        Eric Flora George Hanna Ian Julia Karl Laura Mark Nora Owen Petra Robin Sara Theo Ursula Vera Walter Alice
        Bruno Cora Daniel Elena Frank Gina Hugo Ines Jonas Kira Lukas Maria Nils Otto Paula Ralf Sofia Tobias Viola
        Amir Bilal Chen Dina Emil Fatima Goran Hana Igor Jana Kofi Leila Mina Nadia Omar Priya Rafi Sana Tariq Wei
        Yusuf Zara Abel Boris Celia Dario Edith Felix Gloria Hector Iris Jasper Kevin Linda Martin Naomi Oliver Pablo
        Rita Stella Thomas Vincent Wanda Aaron Betty Colin Diana Edgar Fiona Gavin Holly Isaac Jenny Kurt Lena Mona
        Nick Olga Philip Rachel Steve Tanya Vivian William Agnes Bob Cathy Dan Eva Fred Greta Harry Ida Joe Kim Liam
        Molly Ned Opal Pia Rex Sue Ted Vic Will Amy Bill Carol Don Ellen Gus Hope Jim Ken Luna Meg Nell Pam Ron Sally
        Toby Una Val Willa Arthur Bea Claude Delia Ernest Freya Gilbert Helen Ivan Judith Klaus Lydia Milo Nancy Oren
        Phoebe Rufus Silvia Timo Ulla Vito Wilma Yann Zeno""",
        """Barnaby Cressida Dmitri Eleanor Fergus Guinevere Horace Imogen Jemima Konrad Lavinia Matthias Nadine Orlando
        Philippa Quentin Rosalind Sebastian Tabitha Ulrich Verity Winston Xenia Yolanda Zachary Adelaide Bertram
        Clarissa Desmond Esther Florian Gertrude Humphrey Isolde Jerome Katarina Leopold Marguerite Norbert Octavia""",
    ),
    "town": _pair(
        """Paris London Rome Berlin Madrid Oslo Lima Cairo Tokyo Dublin Vienna Prague Athens Lisbon Warsaw Boston
        Denver Dallas Delhi Milan Geneva Bergen Malaga Porto Seville Turin Lyon Ghent Basel Cork York Leeds Bristol
        Oxford Bath Dover Kiel Bonn Graz Linz Riga Vilnius Tallinn Zagreb Split Sofia_Bay Greenhill Oakton Riverside
        Milltown Stonebridge Redwood Lakeside Fairview Hillcrest Brookfield Ashford Westport Eastgate Northwick
        Southbay Maplewood Ferndale Silverton Goldcrest Windham Foxley Harbourton Seaview Pinewood Cloverdale
        Rosefield Applecross Birchwood Elmswell Thornbury Whitby Kingsley Queensford Newhaven Oldcastle""",
        """Montreal Bucharest Valencia Helsinki Cardiff Nairobi Havana Larkspur Wrenfield Tidewater Amberley
        Coldbrook Hazelmere Moorgate Summerton Winterbourne""",
    ),
    "place": _pair(
        """forest garden castle village harbour mountain valley island meadow beach cave market library school mill
        tower bridge farm lake river park kitchen barn museum bakery desert jungle lighthouse cottage palace swamp
        orchard attic cellar field hill pond town city wood zoo station hospital workshop theatre ship tent hut
        snowy_mountain dark_forest old_mill quiet_village sunny_beach green_valley deep_cave busy_market little_farm
        tall_tower secret_garden empty_house big_city wide_river blue_lake lonely_island hidden_valley golden_field""",
        """vineyard quarry monastery canyon greenhouse windmill fjord courtyard boathouse observatory misty_marsh
        ruined_temple frozen_lake crooked_street""",
    ),
    "object": _pair(
        """key ball hat book lamp kite drum bell cup box coin rope map boat shoe spoon ring stone feather basket
        ladder mirror clock candle blanket bucket broom brush button chair crown flag flute glove hammer horn jar
        kettle knife letter lantern mask needle pen pillow pipe plate pot purse ribbon sack scarf shell shovel
        sled stick sword table torch toy trumpet umbrella vase wagon wheel whistle violin guitar doll puzzle bag
        bottle bowl bracelet bike cart coat diary drawing fan fork helmet jacket jewel marble medal net necklace
        notebook paddle parcel pencil photo pin puppet quilt radio ruler sandal saw skateboard sock sofa
        spade stamp statue string suitcase telescope tent ticket top towel tray balloon cushion acorn seed leaf
        flower rose apple pear egg loaf cheese pie cake biscuit plum cherry pumpkin carrot""",
        """anchor compass teapot wallet hourglass typewriter parachute microscope tambourine chisel thimble
        goblet satchel harp kayak locket scroll snowglobe xylophone""",
    ),
    "animal": _pair(
        """cat dog fox bear rabbit mouse owl frog duck goat horse sheep pig cow hen wolf deer squirrel hedgehog turtle
        lion tiger elephant monkey parrot penguin whale dolphin crab snail bee ant butterfly badger beaver camel donkey
        eagle goose hamster kitten lamb lizard mole otter panda pony puppy raven robin seal snake sparrow spider swan
        toad worm zebra dragon""",
        """llama falcon walrus gecko weasel pelican lynx tortoise ferret heron moose antelope""",
    ),
    "colour": _pair(
        "red blue green yellow black white brown pink purple orange grey silver golden dark_blue light_green dark_red",
        "turquoise crimson violet beige scarlet",
    ),
    "food": _pair(
        """apples pears bread cheese soup cake rice pasta honey plums cherries carrots pancakes eggs fish beans corn
        nuts grapes melons peaches potatoes tomatoes salad pizza noodles biscuits chocolate yoghurt berries figs dates
        porridge toast jam butter muffins waffles dumplings mushrooms onions peas lemons oranges bananas pie stew
        curry sausages pumpkin spinach""",
        """apricots lasagne cucumbers omelettes raisins mangoes sandwiches walnuts asparagus pretzels""",
    ),
    "job": _pair(
        """baker teacher doctor farmer sailor painter singer driver nurse cook gardener pilot builder writer tailor
        fisherman carpenter dancer judge king queen miller mechanic musician plumber postman potter shepherd soldier
        vet waiter weaver librarian dentist clown captain butcher barber actor artist""",
        """blacksmith astronomer locksmith beekeeper translator florist juggler cobbler""",
    ),
    "hobby": _pair(
        """reading swimming dancing painting singing fishing running cooking drawing gardening skating cycling chess
        climbing hiking sailing baking knitting football tennis riding rowing sewing skiing writing camping surfing
        juggling pottery photography""",
        """archery origami badminton birdwatching fencing karate""",
    ),
    "vehicle": _pair(
        "bus train bike car boat ship plane taxi tram truck sled horse cart van ferry canoe scooter balloon",
        "helicopter motorcycle submarine tractor gondola",
    ),
    "instrument": _pair(
        "piano violin drum flute guitar trumpet harp horn cello organ banjo whistle",
        "clarinet saxophone accordion mandolin",
    ),
    "material": _pair(
        "wood stone gold silver glass paper wool iron clay silk leather cotton brick ice straw bronze tin copper",
        "marble bamboo velvet porcelain",
    ),
    "day": _pair("Monday Tuesday Wednesday Thursday Friday Saturday Sunday", ""),
    "month": _pair("January February March April May June July August September October November December", ""),
    "spot": _pair(
        """under_the_bed on_the_table in_the_drawer behind_the_door in_the_kitchen under_the_tree in_the_barn
        on_the_shelf behind_the_sofa in_the_box under_the_stairs in_the_garden near_the_well on_the_roof in_the_bag
        next_to_the_lamp under_the_chair in_the_cupboard behind_the_curtain in_the_attic by_the_window in_the_cellar
        on_the_bench under_the_bridge beside_the_clock inside_the_piano in_the_blue_vase under_the_old_mat
        on_the_top_shelf behind_the_mirror in_the_hollow_tree in_the_shed under_the_rug near_the_gate""",
        """beneath_the_carpet inside_the_oven behind_the_bookcase on_the_windowsill under_the_pillow in_the_garage
        beside_the_fountain in_the_laundry_basket""",
    ),
    "trait": _pair(
        """brave kind clever little shy happy lazy curious friendly gentle hungry lonely merry proud quiet silly sleepy
        strong tiny young old wise careful cheerful funny honest patient busy noisy polite""",
        """stubborn graceful timid bold forgetful generous mischievous""",
    ),
    "subject": _pair(
        "maths music history art science reading geography sport writing drama",
        "chemistry biology",
    ),
    "drink": _pair("tea milk water juice coffee lemonade cocoa cider soda", "espresso buttermilk smoothies"),
    "weather": _pair("sunny rainy windy cloudy snowy cold warm foggy stormy hot", "drizzly frosty humid"),
    "shop": _pair(
        "market bakery bookshop toy_shop corner_shop supermarket flower_shop fish_shop farm_shop shoe_shop",
        "antique_shop hardware_store pharmacy",
    ),
    "relative": _pair("sister brother mother father aunt uncle cousin grandmother grandfather friend neighbour teacher",
                      "niece nephew stepsister"),
    "thingname": _pair("ship boat horse village river house bear dog cat robot star team band street school hill inn",
                       "yacht orchestra glacier spaceship"),
    "secret": _pair("password code_word secret_word magic_word name_of_the_treasure pass_phrase", "watchword access_word"),
}

_ONSET = "b c d f g h k l m n p r s t v w z b d f k l m n p r s t v b c d f g h j k l m n p r s t v w z br cl dr fl gr kl kr pl pr qu sh sk sl sn sp st tr th vr zw ch".split()
_VOWEL = "a e i o u a e i o u ai ee oo ou ia y".split()
_CODA = ["", "", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "nd", "rk", "sh", "ll", "p", "g", "b", "zz"]


def is_held_word(word):
    """Made-up words have no list: the spelling alone decides which side they belong to."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


def made_up(rng, held, syllables=(2, 2, 2, 3, 3, 4)):
    while True:
        n = rng.choice(syllables)
        word = "".join(rng.choice(_ONSET) + rng.choice(_VOWEL) + (rng.choice(_CODA) if i == n - 1 or rng.random() < 0.15 else "")
                       for i in range(n))
        if rng.random() < 0.15:
            word = rng.choice("aeiou") + word
        if len(word) <= 12 and is_held_word(word) == held and word not in _KNOWN:
            return word


_KNOWN = {w.lower() for train, held in LISTS.values() for w in train + held}
