"""What may stand around the number that answers a problem: two tables of phrases, by hand.

Each phrase is the content of an answer block. A phrase of the first two tables has the gold 72, one
of the others the gold behind its arrow.
"""

import pytest

from torchtune_grpo.rewards import grade_math_answer

WRONG = r"""
a third of 72|a quarter of 72|a fifth of 72|two thirds of 72|a tenth of 72|one half of 72|half 72
the half of 72|a fraction of 72|a portion of 72|part of 72|most of 72|all of 72|none of 72
each of 72|a couple of 72|a pair of 72|a couple 72|shy of 72|just shy of 72|short of 72
just short of 72|He is short of 72|shy 72|upward of 72|upwards of 72|upwards 72|in excess of 72
on the order of 72|in the region of 72|in the neighborhood of 72|in the vicinity of 72|north of 72
south of 72|outside of 72|ahead of 72|out of 72|It is out of 72|a multiple of 72|multiple of 72
a factor of 72|a divisor of 72|the square of 72|the cube of 72|the root of 72|the double of 72
the triple of 72|a power of 72|the opposite of 72|the negative of 72|the inverse of 72
the order of 72|a maximum of 72|a minimum of 72|an upper bound of 72|the limit of 72
the logarithm of 72|the successor of 72|the predecessor of 72|besides 72|beside 72|unequal to 72
not equal to 72|differs from 72|different from 72|It differs from 72|apart from 72|aside from 72
away from 72|far from 72|next to 72|close to 72|closer to 72|near to 72|prior to 72|up to 72
It goes up to 72|down to 72|opposed to 72|as opposed to 72|compared to 72|relative to 72
similar to 72|related to 72|proportional to 72|rounded to 72|It rounds to 72|approximated to 72
rounds up to 72|tends to 72|inferior to 72|superior to 72|It is above 72|It is below 72
It is beneath 72|It is beyond 72|It is past 72|It is within 72|It is under 72|It is near 72
It is against 72|It is toward 72|It is towards 72|It is like 72|It is unlike 72|It is versus 72
It is via 72|everything except 72|all but 72|nothing but 72|anything besides 72|save for 72 or 73
after 72|before 72|since 72|until 72|till 72|from 72|between 72|among 72|throughout 72|across 72
per 72|plus 72|times 72|over 72|less 72|modulo 72|to 72|of 72|and 72|or 72|as 72|than 72
more than 72|less than 72|larger than 72|smaller than 72|other than 72|no less than 72
nothing like 72|exceeds 72|It exceeded 72|surpasses 72|It tops 72|It topped 72|approaches 72
It is approaching 72|It is nearing 72|It nears 72|misses 72|It missed 72|lacks 72|pushing 72
It is pushing 72|doubles 72|halves 72|It is halved 72|triples 72|divides 72|It squares 72
bounded by 72 and 73|limited 72|approximately 72|approx 72|approx. 72|circa 72|roughly 72|about 72
some 72|nearly 72|almost 72|practically 72|virtually 72|basically 72|barely 72|hardly 72|maybe 72
presumably 72|probably 72|It is probably 72|It is roughly 72|It is nearly equal to 72|I guess 72
I'd guess 72|my guess is 72|I believe 72|I think it is 72|say 72|let us say 72|suppose 72|if 72
whether 72|either 72|neither 72|never 72|not 72|It's not 72|It isn't 72|isn't 72|cannot be 72
can't be 72|wrong 72|wrong: 72|false: 72|incorrect: 72|The wrong answer is 72
It is false that it is 72|no 72|without 72|twice 72|thrice 72|double 72|triple 72|dozen 72
a hundred 72|hundred and 72|one thousand 72|seven 72|twelve 72|seventy 72|minus 72|negative 72
The answer is minus 72|It is negative 72|-72|- 72|(-72)|Step 72|Chapter 72|Page 72|Room 72
Question 72|Apartment 72|Highway 72|Version 72|Line 72|Option 72|December 72|print 72|return 72
lambda 72|lambda: 72|sqrt 72|log 72|x 72|f(72)|sum(72)|(72|72)|(72, 73)|(72)(73)|((72)|[72]
72 upwards|72 upward|72 and upwards|72 and up|72 or more|72 odd|72 score|72 gross|72 below
72 below zero|72 above|72 over|72 under|72 about|72 up|72 plus|72 minus|72 thousand|72 million
72 hundred|72 dozen|72 dozen eggs|72 thousand apples|72 billion|72 k|72k|72K|72x|72a|72a day|72b
72e|72th|72nd|72%%|72 and a half|72 and change|72 to 80|72 squared|72 cubed|72 factorial|72 halves
72 tenths|72 percent of 50|72-ish|72 ish|72 maybe|72, maybe|72 perhaps|72 probably|72 approximately
72, roughly|72 or so|72 or thereabouts|72 if lucky|72 not|72 not apples|72, not|72 (not)|72 wrong
72 (wrong)|72 (wrong answers)|72, wrong answers|72 is wrong|72 false|72 negative|72 double
72 triple|72 double that|72 double this|72 random|72 isn't it|72 isn't right|72 is not right
72 is incorrect|72 is too low|72 than|72 more than that|72 times 2|72 or 73|72, 73|72 73|72 twenty
72 twenty-one|72 inf|72 pi|72~73|~72|~~72~~|72~|~ 72|72 ~ apples|is~72|~\boxed{72}|is ~\boxed{72}
72 maximum|72 max|72 tops
72 at most|72 or fewer|72 excluding tax|72 without tax|72 isnt right|It isnt 72|about: 72
at least: 72|Estimate: 72|Guess: 72|Twice: 72|It seems to be 72|It is thought to be 72|$72k
the answer isnt equal to 72|He can make up to 72|He earned over $72|She got almost 72|not quite 72
72 apples formerly|Old: 72|72 away from the answer|72 in former times|72 but more|72 as much as
72 was the old answer|72 is near|The answer rounds to 72|72 est|It is in the range of 72|72 once
72 as an estimate|72 rather than the answer|One more than 72|72 just about|He cannot sell 72
72 plus tax|72 when halved|It was meant to be 72|72 modulo ten|He aimed for 72
The trap answer is 72|Double the answer is 72|Given that it is 72|72 comes close|To the tune of 72
72 but I doubt it|72 subject to change|72 by a rough count|72 or over|72 apples short|72 next year
Hypothetically, 72|It fell to 72|72 at the upper end|72 three-quarters|72 apples originally
72 less tax|72 approximate|72 fifteenths|The answer divided by two is 72|Were it to be 72
The previous answer was 72|72 at the high end|He sold up to 72|72 provisional|It is one of 72
It ranges up to 72|It is a fraction of 72|It was previously 72|72 inclusive|Off by 72|72 twelfths
72 as of last year|72 aside|Would that it were 72|72 give or take|The reciprocal of 72
Assume it is 72|Once 72|None of them have 72|He nearly sold 72|72 as opposed to more|Hopefully 72
It peaked at 72|It is twice 72|72 in the red|Bo said 72|The answer is nothing like 72
72 from memory|72 rounded up|72 onwards|The negative of the answer is 72|It wasn't 72
It hovers around 72|72 or less|72 no more|72 in binary|Everyone except Bo has 72|72 nope|I doubt 72
Until recently 72|72 in place of the answer|72 psych|I reckon 72|72 divided by two
It stops short of 72|72 as good as|72 or above|72 under protest|72 typically|It beats 72|72 off
72 is close|72 estimated|The sum of the digits of 72|It outstrips 72|72 dozens|It may have been 72
72 apples or so|72 and a bit|Some multiple of 72|72 upside down|It has been 72|Something like 72
Nearby 72|72 never|72 generally|72 used to be right|It is believed to be 72|72 normally
72 apples at best|72 through 80|Range: 72|It averages around 72|72 apples to 80|72 nearly
Bo claims it is 72|Old answer: 72|72 at the top end|72 is the upper bound|It is all but 72
72 is off|Pretend it is 72|He would have sold 72|Some say it is 72|72 in the past|72 dunno
72 had he stayed|It is down from 72|Initially, 72|Going on 72|72 unlike the answer|72 is unlikely
72 thru 80|72 and then some|72 by mistake|72 apples at least|72 is false|72 to the second power
Around: 72|72 can't be right|Possibly 72|Never: 72|It would have been 72|Upper bound: 72
It dwarfs 72|72 on the nose minus one|It lies between 70 and 72|72 provided that he comes|72 tbd
72 apples above the answer|72 eventually maybe|72 at the outside|I reckon it is 72|It trails 72
72 almost|It is well over 72|72 reportedly|72 apples if lucky|You would think 72|My guess is 72
72 all told minus fees|72 or near it|72 in principle|72 hundreds|72 to put it mildly
It is likely 72|I'd say 72
72 and rising|72 and grows|72 and counting
"""
RIGHT = r"""
72|72.|72.0|$72|$72.00|72 clips|72 clips.|**72**|**72 clips**|= 72|x = 72|n=72|Answer: 72
Answer: 72 clips|Total: 72 clips|Total = 72|Final Answer: 72|Final answer: **72**|The answer is 72
The answer is 72.|The final answer is 72.|The answer is: 72|The correct answer is 72
The result is 72|The total is 72|The sum is 72|The solution is 72|So the answer is 72.
So, the answer is 72|So 72|Thus, 72|Hence 72|Hence, 72 clips|Therefore, 72|Therefore 72 clips
Finally, 72|In total, 72 clips|Altogether, 72 clips|In all, 72|Yes, 72|It is 72|It's 72|That's 72
There are 72|There are 72 clips|There were 72 clips|We get 72|We have 72|You get 72|This gives 72
which gives 72|equals 72|is 72|are 72|was 72|The result is equal to 72|It is equivalent to 72
It adds up to 72|It comes to 72|That comes out to 72|It amounts to 72
which amounts to a total of 72|sums to 72|totals 72|It totals $72|a total of 72|a total of 72 clips
for a total of 72 clips|She sold a total of 72 clips|a sum of $72|a profit of $72
He made a profit of $72|a change of $72|an average of 72|a cost of $72|a distance of 72 miles
a length of 72 cm|a speed of 72 km/h|a weight of 72 pounds|an area of 72 m²|exactly 72|only 72
just 72|precisely 72 clips|She has exactly 72 left|He still has 72 apples|She now has 72 apples
He also sold 72|It is now 72|The total is only 72|So, Natalia sold 72 clips altogether
Natalia sold 72 clips altogether in April and May|Natalia sold 72 clips|He has 72 apples left
He has 72 apples left.|She has $72|She has $72 left|They have 72|He had 72 marbles|She earned $72
She earns $72 a week|He makes $72|She made $72 every day at the farmers' market
Betty needs $72 more|James writes 72 pages a year|Ken had 72 pounds of goodies
Tina worked for 72 hours|It takes 72 minutes|It took him 72 minutes|It will take 72 days
It cost him $72|It costs $72|The total cost is $72|The bill was $72|The price is $72 per person
Each person pays $72|He paid $72|He will pay $72|He has to pay $72|They must pay $72 each
She spent $72 on clothes|She spends $72 a month|She saved $72|She can save $72
He will need 72 bricks|She should receive $72|They did 72 push-ups|The chickens laid 72 eggs
The team scored 72 points|Lee scored 72|He scores 72 goals|He ran 72 miles
She runs 72 meters a week|He walked 72 steps|He drove 72 miles|She read 72 pages|He ate 72 cookies
She ate 72|He used 72 tiles|They used 72|He gave her 72 marbles|She gave away 72 toys
He was given 72 stamps|He is left with 72 apples|She ended up with 72|He started with 72
It increased by 72|She is 72 years old|Tom is 72|Tom's age is 72|Janet’s total is $72
Mr. Smith earns $72.|A third of the students is 72|The number of clips is 72
The number of eggs sold was 72|The area of the garden is 72 square feet|The perimeter equals 72 cm
He received 72 letters|He sells the house for $72|He finished in 72 days|It weighs 72 kg
It contains 72 candies|There remain 72 apples|leaving 72 apples|leaving her with 72
The remaining amount is $72|US$72|USD 72|72 USD|72 dollars|72 euros|€72|72 €|Rs. 72|£72 each
72 apples|72 double rooms|72 wrong answers|72 negative reviews|72 false alarms|72 random numbers
72 possible outcomes|72 triple scoops|72 imaginary friends|72 fake coins|72 invalid votes
72 incorrect answers|72 different flavors|72 two-way tickets|72 double-decker buses
72 half-price tickets|72 one-dollar bills|72 third graders|72 more pages than Bo|72 fewer apples
72 more apples|72 apples more|72 apples left over|72 apples in the basket|72 apples each
72 apples per day|72 km/h|72 m²|72 cm^2|72 °C|72%|72 percent|72% of the students|72 hours a day
72 a day|72 miles to go|72 minutes later|72 years old|72 years|72 m|72 A|72 kilograms|72 kg|72kg
72 clips (in total)|72 clips, altogether|72 is the answer|72 is correct|72 clips were sold
72 students passed the test|72 people are left|72 (clips)|72 of them|72 for each child
72 when he retires|72 at the end|72 by May|72 clips in May|(72)|(72).|(72) clips|($72)|x = (72)
The answer is (72)|$(72)$|**(72)**|\boxed{(72)}|\boxed{72}|$\boxed{72}$|\(72\)|\[72\]|$72$
$72$ clips|72 \text{ clips}|72\ \text{clips}|\text{72 clips}|72~clips|72~\text{clips}
72 \mathrm{~cm}|72\mathrm{~km}/\mathrm{h}|$72 \mathrm{~cm}$|\boxed{72 \mathrm{~cm}}|7.2e1|7.2E1
7.2e+1|720e-1|72e0|0.72e2|7.2e1 apples|144/2|\frac{144}{2}|48 + 24 = 72
48 clips + 24 clips = 72 clips|Natalia sold 48 + 24 = 72 clips
She sold 48+24=72 clips altogether in April and May.|100 minus 28 = 72|There will be 72 left
72 total clips|72 total|We need 72 cups|You need 72 cups|I counted 72|We found 72|Clips sold: 72
Cost per person: $72|Amount left: $72|Since May, 72|72 sq ft|72 lbs|72 oz.|72 mph|A$72
72 left|The number of apples is 72.|So, 72|It totals 72|72 dollars in change
The length of the rope is 72 feet|The total number of eggs is 72|Number of days: 72|It costs $72.
Answer: $72|72 remaining|It lasted 72 days|72 days from now|The number of minutes is 72.
72 degrees Fahrenheit|72 cubic feet|Every child gets 72|He practiced 72 minutes|He sent 72 letters
72 books remain|He gets 72 eggs|72 students took the bus|The weight is 72 kg
We conclude that the answer is 72|He delivered 72 papers|Dividing gives 72|The distance is 72 miles
72 cents per pound|72 lost balls|He answered 72 questions|Thus she earns $72 per day.
He picks 72 flowers|72 false starts|72 missing pieces|He carried 72|72 more|He cut 72 slices
72 apples remaining|I have 72|72 tickets were sold on Monday|Altogether, there are 72
He grew 72 flowers|72 pages left to read|He has to buy 72 eggs|72 kg of rice
72 points higher than Bo|answer = 72|72 minutes to finish|The box has 72 pens|He solved 72 problems
72 dollars each|This means that he sold 72|After the sale, 72 remained|He receives $72
They are 72 miles apart|So 72 students are in the class|It takes 72 days.|It is worth $72
He drew 72 pictures|72 apples|He drank 72 ounces|72 dozen-packs|The store made $72
72 eggs is the answer|72 pounds of beef|72 children|So 72 in total.|That is 72
Together, they sold 72|72 pieces of candy|That makes 72.|She has 72 left|It took 72 days to finish
The value is 72|It was worth $72|72 negative numbers|72 mistakes|72 lost dogs
In the end he has 72 marbles.|72 marbles altogether|My answer is 72|72 rejected applications
It holds 72 gallons|Yes: 72|There are a total of 72 eggs|He traveled 72 miles|72 possible outcomes
72 in total|Yes, the answer is 72|72 quarter notes|He had to pay $72
The amount of money left is $72|He wins 72 games|72 hours in three days|He slept 72 hours
The product is 72|$72 per week|Both have 72|72 GB|72 pages to go|72 red and blue marbles
So, in total, 72|72 uneaten cookies|72 books were sold|They spent $72.|72 km per hour|72 rounds
$72 in savings|72 nickels and dimes|72 butterflies|This means she has 72 left|He got 72 eggs
$72 every week|72|72 random people|x equals 72|We need 72 eggs.|72 women|72 years older than Bo
72 miles apart|72¢|72 new cars|72 miles away|Together they have 72 marbles.|72 hours per week
Sally sold 72 cups|72 half-eaten apples|He lost 72 marbles|There are 72 apples in the basket
He painted 72 fences|He owes $72|He raised $72|$72 in profit|Together they have 72
The bakery sells 72 loaves.|Her change is $72|The price of the book is $72
In total she sold 72 apples.|He drives 72 miles|72 bags of chips|He fed 72 birds
Anna is 72 years old.|It measures 72 cm|She earns $72 per week|x is 72|The perimeter is 72 cm
Total: 72|Money left: $72|We have 72 eggs.|The speed is 72 mph|On Monday he sold 72
She spends $72 on food|She saves $72 every month|We find 72|He will have 72 eggs
The answer is \boxed{72}.|He picked 72 flowers|Answer: 72|72 extra points|It takes her 72 minutes
The farmer has 72 sheep|He ate 72 cookies|The volume is 72 liters|n = 72 apples|He hit 72 targets
In total, there are 72 eggs|He saw 72 birds|72 feet tall|It held 72|72 minimum payments
"""
WRONG_WITH_GOLD = r"""
7.2e1 -> 7.2|7.2e1 -> 720|7.2e2 -> 72|72e1 -> 72|72e0.5 -> 72|72e100 -> 72|7.2 e1 -> 72|e1 -> 10
\frac{-3}{2} -> 1.5|\frac{3}{-2} -> 1.5|-\frac{-3}{2} -> -1.5|\frac123 -> 0.5|\frac1 -> 1
\frac{1} -> 1|\frac1.5 -> 1.5|\frac{--3}{2} -> 1.5|\frac{3 2}{2} -> 1.5|minus 72 -> 72
minus -72 -> 72|minus minus 72 -> 72|ten minus 72 -> -72|x minus 72 -> -72|100 minus 72 -> -72
12~13 -> 12|12 \mathrm{~13} -> 12
"""
RIGHT_WITH_GOLD = r"""
minus 72 -> -72|negative 72 -> -72|Minus 72 -> -72|The answer is minus 72. -> -72
It is minus $72 -> -72|-72 -> -72|(-72) -> -72|The temperature is negative 72 degrees -> -72
-7.2e1 -> -72|\frac{-3}{2} -> -1.5|\frac{3}{-2} -> -1.5|-\frac{-3}{2} -> 1.5|\frac{-3}{-2} -> 1.5
\frac32 -> 1.5|\frac 32 -> 1.5|\dfrac12 -> 0.5|-\frac32 -> -1.5|\boxed{\frac32} -> 3/2
$\frac{-3}{2}$ -> -3/2|1e3 -> 1000|1.5e-3 -> 0.0015|12~apples -> 12|12 \mathrm{~cm} -> 12
"""


def phrases(table: str) -> list[tuple[str, str]]:
    """Pairs of phrase and gold."""
    cells = "|".join(table.strip().splitlines()).split("|")
    return [(phrase, gold or "72") for phrase, _, gold in (c.partition(" -> ") for c in cells)]


@pytest.mark.parametrize(
    ("table", "correct"),
    [(WRONG, False), (RIGHT, True), (WRONG_WITH_GOLD, False), (RIGHT_WITH_GOLD, True)],
)
def test_what_stands_around_the_number_decides(table: str, correct: bool) -> None:
    assert len(phrases(table)) > 20
    assert [
        (phrase, gold)
        for phrase, gold in phrases(table)
        if grade_math_answer(f"<think>a</think><answer>{phrase}</answer>", gold) is not correct
    ] == []
