// The random numbers of torch's host generator (the Mersenne Twister, MT19937) that nobody looks at, passed over.
//
// The twister is linear: let x take a state to the next, then x^J takes it J words on, and as a polynomial in x with coefficients
// of one bit, x^J has the same effect as its remainder by the twister's characteristic polynomial. The remainder is a sum (XOR)
// of some of the 19937 states that follow, so a jump costs the same however far it goes. (Haramoto and others, "Efficient jump
// ahead for F2-linear random number generators", 2008.) The native half for a CPU build of torch includes this file as C++.
#include <stdint.h>
#include <string.h>

#define WORDS 624
#define AHEAD 397
#define UPPER 0x80000000u
#define LOWER 0x7fffffffu
#define TWIST 0x9908b0dfu
#define DEGREE 19937
#define TERMS ((int)(sizeof(LOWER_TERMS) / sizeof(LOWER_TERMS[0])))
#define LIMBS 312     // words of 64 bits that hold a remainder; its square takes twice as many
#define AT_ONCE 32    // times 624 words that are made at once, as many as a sum of states needs
#define PLAINLY 4000  // times 624 words, below which making them is faster than a jump

typedef uint32_t Quad __attribute__((vector_size(16), aligned(4), may_alias));

// The twister's characteristic polynomial is x^19937 and these powers (Berlekamp and Massey's algorithm found them).
static const unsigned LOWER_TERMS[] = {
    19314, 19087, 18860, 18691, 18633, 18406, 18237, 18179, 18068, 17952, 17841, 17783, 17725, 17498, 17445, 17329, 17271,
    17160, 17044, 16933, 16875, 16822, 16817, 16595, 16590, 16537, 16421, 16368, 16363, 16252, 16141, 16136, 16025, 15967,
    15909, 15682, 15629, 15576, 15513, 15455, 15349, 15344, 15228, 15117, 15059, 15006, 15001, 14953, 14779, 14774, 14721,
    14605, 14552, 14547, 14436, 14325, 14320, 14209, 14151, 14093, 13866, 13813, 13760, 13697, 13639, 13533, 13528, 13412,
    13301, 13243, 13190, 13185, 13137, 12963, 12958, 12905, 12789, 12736, 12731, 12673, 12620, 12509, 12504, 12393, 12335,
    12277, 11997, 11944, 11881, 11838, 11717, 11712, 11611, 11485, 11384, 11374, 11321, 11215, 11157, 11147, 11089, 10920,
    10761, 10693, 10128, 9969, 9901, 9505, 8206, 7979, 7752, 7583, 7525, 7477, 7129, 6569, 6337, 5661, 4753, 4362, 4135, 3908,
    3681, 3454, 3227, 3000, 2773, 2493, 1870, 1643, 1585, 1416, 1189, 0};

// Write the words that follow the first 624; their count is a multiple of 4.
static void follow(uint32_t *words, int count) {
  for (uint32_t *at = words; at < words + count; at += 4) {
    const Quad next = *(const Quad *)(at + 1), word = (*(const Quad *)at & UPPER) | (next & LOWER);
    *(Quad *)(at + WORDS) = *(const Quad *)(at + AHEAD) ^ (word >> 1) ^ (-(next & 1) & TWIST);
  }
}

// A polynomial's square has a zero between its bits.
static uint64_t spread(uint64_t bits) {
  bits = (bits | bits << 16) & 0x0000ffff0000ffff;
  bits = (bits | bits << 8) & 0x00ff00ff00ff00ff;
  bits = (bits | bits << 4) & 0x0f0f0f0f0f0f0f0f;
  bits = (bits | bits << 2) & 0x3333333333333333;
  return (bits | bits << 1) & 0x5555555555555555;
}

// Add the lower powers that equal 64 powers of x from x^place on, which is x^19937 or higher.
static void add_equal(uint64_t *limbs, unsigned place, uint64_t powers) {
  for (int term = 0; term < TERMS; term++) {
    const unsigned to = place - DEGREE + LOWER_TERMS[term], up = to % 64;
    limbs[to / 64] ^= powers << up;
    limbs[to / 64 + 1] ^= powers >> 1 >> (63 - up);
  }
}

// Write the remainder of x^exponent to the lower half of 2 * LIMBS: a square for each bit of the exponent, times x where it is set.
static void power_of_x(uint64_t *limbs, int64_t exponent) {
  int bit = 0;
  while (exponent >> bit >= DEGREE) bit++;
  memset(limbs, 0, 2 * LIMBS * sizeof(uint64_t));
  limbs[(exponent >> bit) / 64] = (uint64_t)1 << (exponent >> bit) % 64;
  while (bit--) {
    const int odd = exponent >> bit & 1;
    for (int i = LIMBS - 1; i >= 0; i--) {
      const uint64_t limb = limbs[i];
      limbs[2 * i] = spread(limb & 0xffffffff) << odd;
      limbs[2 * i + 1] = spread(limb >> 32) << odd;
    }
    // the remainder, from the top: no lower power reaches the limb it stands for, as the highest of them is 623 below
    for (int i = 2 * LIMBS - 1; i >= LIMBS; i--) add_equal(limbs, 64 * i, limbs[i]);
    const uint64_t above = limbs[LIMBS - 1] >> DEGREE % 64;
    limbs[LIMBS - 1] ^= above << DEGREE % 64;
    add_equal(limbs, DEGREE, above);
  }
}

// Add up the states that start at these places of a row of words. The parts of the sum have names so that they stay in registers.
static void sum_states(const uint32_t *words, const int *places, int count, uint32_t *sum) {
  for (int at = 0; at < WORDS; at += 24) {
    Quad a = {}, b = {}, c = {}, d = {}, e = {}, f = {};
    for (int i = 0; i < count; i++) {
      const Quad *state = (const Quad *)(words + places[i] + at);
      a ^= state[0], b ^= state[1], c ^= state[2], d ^= state[3], e ^= state[4], f ^= state[5];
    }
    Quad *to = (Quad *)(sum + at);
    to[0] = a, to[1] = b, to[2] = c, to[3] = d, to[4] = e, to[5] = f;
  }
}

// Go on by 624 words, this many times.
static void step(uint32_t *state, int64_t times) {
  uint32_t words[(AT_ONCE + 1) * WORDS];
  memcpy(words, state, WORDS * sizeof(uint32_t));
  while (times > 0) {
    const int some = times < AT_ONCE ? (int)times : AT_ONCE;
    follow(words, some * WORDS);
    memmove(words, words + some * WORDS, WORDS * sizeof(uint32_t));
    times -= some;
  }
  memcpy(state, words, WORDS * sizeof(uint32_t));
}

// Do the same at a cost that hardly grows with the times.
static void jump(uint32_t *state, int64_t times) {
  step(state, 1);  // no word depends on the lower bits of a seed's first word: the polynomial holds for the states after it
  uint64_t limbs[2 * LIMBS];
  power_of_x(limbs, (times - 1) * WORDS);
  int places[DEGREE], count = 0;
  for (int place = 0; place < DEGREE; place++)
    if (limbs[place / 64] >> place % 64 & 1) places[count++] = place;
  uint32_t words[(AT_ONCE + 1) * WORDS];
  memcpy(words, state, WORDS * sizeof(uint32_t));
  follow(words, AT_ONCE * WORDS);
  sum_states(words, places, count, state);
}

// Bring a generator to where it is after so many more numbers. As torch keeps it, `next` is the word to be taken next, and the draw
// with which `left` comes to nothing makes a new state first.
__attribute__((visibility("default"))) void tn_pass_over(uint32_t *state, int32_t *left, uint32_t *next, int64_t count) {
  if (count < *left) {
    *left -= (int32_t)count;
    *next += (uint32_t)count;
    return;
  }
  const int64_t times = (count - *left) / WORDS + 1;
  const int32_t taken = (int32_t)((count - *left) % WORDS);
  (times < PLAINLY ? step : jump)(state, times);
  *left = WORDS - taken;
  *next = (uint32_t)taken + 1;
}
