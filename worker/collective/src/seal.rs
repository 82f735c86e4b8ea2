//! Sealed sums: a box adds messages that it can neither read nor forge.
//!
//! ## Keys
//! All ranks have a [`Secret`] that nobody else has. In each session each rank draws a key pair of
//! X25519 (RFC 7748), and rank 0 also a *group key* of 32 bytes. The public keys go around the ring
//! of bypass connections twice ([`Exchange`]):
//!
//! 1. Each rank adds its own, with a *proof*: HMAC-SHA256 of the list so far, by a key of the
//!    secret. A rank, and rank 0 at the end, goes on only if the proof is right.
//! 2. Rank 0 sends the list and the group key, which each rank opens, and seals to the next:
//!    AES-256-GCM, by a key that is used once, of the secret and of both neighbours' key pairs. A
//!    rank goes on only if its own public key is at its own place. Rank 0 goes on when the group
//!    key is back.
//!
//! Keys come from HKDF-SHA256 (RFC 5869). The input is the secret and what is named below, the
//! salt a hash of the list, and of all that the ranks must agree on: names of job and group, and
//! how data is cut. So ranks of two sessions, or with two ideas of one, never sum with each other.
//!
//! | label | beside the secret | key of |
//! | --- | --- | --- |
//! | `list` | nothing, with an empty list | proofs |
//! | `hop`, place i | what X25519 gives ranks i and i + 1 | the group key from rank i to rank i + 1 |
//! | `pad`, place i | the group key | the pad that ranks i - 1 and i share |
//! | `sum` | the group key | the pad of the sum |
//! | `tag` | the group key | the weights of the tags |
//! | `bypass`, place i | the group key | what rank i sends to the next rank |
//! | `session` | the group key | the number of the session |
//!
//! A rank's keys depend on a key pair that it has just drawn. So no replayed message makes it use a
//! key of an earlier session. A wrong proof, or a group key that does not open, is the same error
//! as another secret.
//!
//! *Forward secrecy*: somebody who learns the secret after all ranks have opened a session cannot
//! read its recording. Rank 0 begins the second round only with a list that continues its own key,
//! with a right proof, and each rank proves only a list that it has checked. So, while nobody else
//! has the secret, ranks have drawn all keys of that list for it, and what X25519 gives neighbours
//! seals the group key. A rank takes only a list that continues the one that it has proved. Ranks
//! drop their private keys and the group key when the session opens or fails, and clear the memory
//! of keys that they drop, but not the copies that libraries and the compiler leave on the stack.
//! Without proofs in the first round, somebody in the middle could put in a public key of theirs,
//! and rank 1 would send sums before rank 0 finds out. Somebody who breaks X25519 needs the secret
//! as well. For some public keys X25519 gives zeros, whatever the private key is: these are
//! refused.
//!
//! *Why not Noise or HPKE*: bypass connections lead one way, so the answers of Noise's handshakes
//! would travel around the ring. HPKE (RFC 9180) would add a key pair for each hop, and the proofs
//! would remain.
//!
//! ## Pads
//! Rank i adds `k(i) - k(i + 1)` to its lanes, modulo 2^32; rank 0 also adds `s`. Each is the key
//! stream of AES-256 in counter mode; the counter begins with the ring and the message's number.
//! In the sum the k(i) cancel, and every rank subtracts s. The N pads are N independent uniform
//! numbers: what ranks send and what they receive says nothing about the data.
//!
//! *Must*: a pad never covers two contents. A message of a session is built once, in the order of
//! its numbers, which [`Seal::close`] enforces. It is repeated, and summed over the hosts' ring
//! after a fallback, as it was built.
//!
//! ## Tags
//! The lanes x(j) of a message are integers whose sum over all ranks does not wrap: see [`Signs`].
//! The tag is `sum of w(j) x(j)` modulo p = 2^61 - 1 with secret weights w(j), in three lanes of
//! 21 bits, so that it adds up like the data. A changed sum has the right tag with a probability
//! of about 2^-61: the weights are uniform, and tags are padded, so they reveal nothing about the
//! weights (Carter and Wegman, "New hash functions and their use in authentication and set
//! equality", 1981).
//!
//! ## Bypass connections
//! After the exchange each message has 16 more bytes, of AES-256-GCM with a count as nonce.

mod exchange;

use std::fmt;

use aes::cipher::BlockCipherEncrypt;
use aes::{Aes256Enc, Block};
use aes_gcm::aead::AeadInOut;
use aes_gcm::aead::consts::U32;
use aes_gcm::{Aes256Gcm, KeyInit, KeySizeUser, Tag};
use hkdf::Hkdf;
use multiversion::multiversion;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::buffer::Buffer;
use crate::numeric::reference::add_lanes;
use crate::numeric::signs::Signs;

pub use exchange::{Exchange, GroupKey, Proof, PublicKey, SealedKey, Share};

/// Bytes of a tag, at the end of a message.
pub const TAG_BYTES: usize = 12;
/// Bytes that a bypass message becomes longer by.
pub const BYPASS_BYTES: usize = 16;

/// Fewest bytes of a secret.
const LEAST_SECRET: usize = 16;
/// p.
const MODULUS: u64 = (1 << 61) - 1;
const LIMB_BITS: u32 = 21;
/// Bytes of a block of AES, and blocks of a pad that are made at a time.
const BLOCK_BYTES: usize = 16;
const BATCH: usize = 256;

type Key = Zeroizing<[u8; 32]>;

/// What the ranks of a job know, and nobody else: a hash of it, which is cleared when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<[u8; 32]>);

impl Secret {
    /// From at least 16 random bytes, as text. They are not stretched: a password is too weak.
    ///
    /// # Errors
    /// If it is shorter.
    pub fn new(text: &str) -> Result<Self, String> {
        if text.len() < LEAST_SECRET {
            return Err(format!(
                "must have at least {LEAST_SECRET} characters, at random: `openssl rand -hex 32`"
            ));
        }
        Ok(Self(Zeroizing::new(Sha256::digest(text).into())))
    }
}

/// Does not print it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The message did not come from the neighbour as it is, or the neighbour has another secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forged;

/// The keys of a session at one rank.
pub struct Seal {
    /// The pad of sums.
    sum: Aes256Enc,
    session: u64,
    /// What is added to and subtracted from this rank's messages, and the previous rank's.
    own: Pads,
    previous: Pads,
    ranks: u32,
    weights: Weights,
    /// By ring: the number of the next message.
    next: Vec<u64>,
    outgoing: Bypass,
    incoming: Bypass,
    /// Whether the previous rank's messages are sealed from now on.
    pub opens: bool,
}

struct Pads {
    plus: Aes256Enc,
    minus: Aes256Enc,
    sum: Option<Aes256Enc>,
}

struct Bypass {
    cipher: Aes256Gcm,
    count: u64,
}

impl Bypass {
    fn nonce(&mut self) -> [u8; 12] {
        self.count += 1;
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.count.to_le_bytes());
        nonce
    }
}

impl Seal {
    /// From the root of the session's keys.
    fn new(root: &Hkdf<Sha256>, (rank, ranks): (u32, u32), (rings, longest): (u32, usize)) -> Self {
        let sum: Aes256Enc = cipher(root, "sum", 0);
        let pads = |rank| Pads {
            plus: cipher(root, "pad", rank),
            minus: cipher(root, "pad", (rank + 1) % ranks),
            sum: (rank == 0).then(|| sum.clone()),
        };
        let bypass = |rank| Bypass { cipher: cipher(root, "bypass", rank), count: 0 };
        let mut weights = Zeroizing::new(vec![[0; BLOCK_BYTES]; longest.div_ceil(BLOCK_BYTES) * 2]);
        pad(&cipher(root, "tag", 0), (0, 0), 0, &mut weights);
        let [a, b, c, d, e, f, g, h, ..] = *key(root, "session", 0);
        let previous = (rank + ranks - 1) % ranks;
        Self {
            session: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            own: pads(rank),
            previous: pads(previous),
            weights: Weights::new(weights.as_flattened()),
            next: vec![0; rings as usize],
            outgoing: bypass(rank),
            incoming: bypass(previous),
            opens: false,
            ranks,
            sum,
        }
    }

    /// The number of the session.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// Appends the tag of a message and adds the pads. The first `untagged` bytes have none.
    ///
    /// # Panics
    /// If the message is not the ring's next one: its pad would cover two contents.
    pub fn close(
        &mut self,
        (ring, number): (u32, u64),
        untagged: usize,
        parts: (usize, Signs),
        message: &mut Buffer,
    ) {
        let next = &mut self.next[ring as usize];
        assert_eq!(number, *next, "a message of ring {ring} is built twice");
        *next += 1;
        let tag = u128::from(self.tag(&message[untagged..], parts));
        let Pads { plus, minus, sum } = &self.own;
        let modulus = u128::from(MODULUS);
        let blind = blind(plus, (ring, number)) + modulus - blind(minus, (ring, number))
            + sum.as_ref().map_or(0, |sum| self::blind(sum, (ring, number)));
        let tag = (tag + blind) % modulus;
        let lane = |limb: u32| (tag >> (limb * LIMB_BITS)) as u32 & ((1 << LIMB_BITS) - 1);
        message.extend_from_slice([0, 1, 2].map(|limb| lane(limb).to_le_bytes()).as_flattened());
        change(message, (ring, number), [Some(plus), sum.as_ref()], [Some(minus), None]);
    }

    /// Subtracts the pad of a sum.
    pub fn open(&self, id: (u32, u64), sum: &mut [u8]) {
        change(sum, id, [None; 2], [Some(&self.sum), None]);
    }

    /// Of a message without the right sum after [`open`](Self::open): subtracts the pads of the
    /// previous rank's own instead. It is that where no box sums.
    pub fn reopen(&self, id: (u32, u64), message: &mut [u8]) {
        let Pads { plus, minus, sum } = &self.previous;
        let own_sum = if sum.is_some() { None } else { Some(&self.sum) };
        change(message, id, [Some(minus), own_sum], [Some(plus), None]);
    }

    /// Whether a sum without its tag, which may be empty, has this tag.
    pub fn is_right(
        &self,
        id: (u32, u64),
        tag: &[u8],
        lanes: &[u8],
        parts: (usize, Signs),
    ) -> bool {
        let limbs = tag.as_chunks::<4>().0.iter().map(|limb| u32::from_le_bytes(*limb));
        let most = self.ranks * ((1 << LIMB_BITS) - 1);
        let places = 0u32..;
        let mut tag_value = 0u128;
        for (place, limb) in places.zip(limbs) {
            if limb > most {
                return false;
            }
            tag_value += u128::from(limb) << (place * LIMB_BITS);
        }
        let expected = u128::from(self.tag(lanes, parts)) + blind(&self.sum, id);
        let modulus = u128::from(MODULUS);
        tag.len() == TAG_BYTES && tag_value % modulus == expected % modulus
    }

    /// The tag of some lanes, of which those of `exponents` bytes come first and are not negative.
    fn tag(&self, lanes: &[u8], (exponents, signs): (usize, Signs)) -> u64 {
        let lanes = lanes.as_chunks().0;
        let first = if signs == Signs::Signed { exponents / 4 } else { lanes.len() };
        let (unsigned, signed) = lanes.split_at(first);
        let sum = self.weights.sum(0, unsigned, products)
            + self.weights.sum(first, signed, signed_products);
        // As a signed number, a lane with the highest bit is 2^32 less.
        let less: u128 = match signs {
            Signs::One { place, of } => {
                let lanes = lanes.iter().enumerate().skip(exponents / 4 + place).step_by(of);
                let negative = lanes.filter(|(_, lane)| lane[3] & 0x80 != 0);
                negative.map(|(place, _)| u128::from(self.weights.one(place))).sum()
            }
            Signs::Signed | Signs::Unsigned => 0,
        };
        (sum - (less << 32) as i128).rem_euclid(MODULUS.into()) as u64
    }

    /// Seals a message to the next rank.
    pub fn close_bypass(&mut self, message: &mut Buffer) {
        let nonce = self.outgoing.nonce();
        let sealed = self.outgoing.cipher.encrypt_inout_detached(
            &nonce.into(),
            &[],
            (&mut **message).into(),
        );
        message.extend_from_slice(&sealed.expect("a message is shorter than 256 GiB"));
    }

    /// Opens the previous rank's next message.
    ///
    /// # Errors
    /// If it is not that.
    pub fn open_bypass(&mut self, message: &mut Buffer) -> Result<(), Forged> {
        let nonce = self.incoming.nonce();
        let length = message.len().checked_sub(BYPASS_BYTES).ok_or(Forged)?;
        let (sealed, tag) = message.split_at_mut(length);
        let tag = Tag::try_from(&*tag).map_err(|_| Forged)?;
        let opened =
            self.incoming.cipher.decrypt_inout_detached(&nonce.into(), &[], sealed.into(), &tag);
        opened.map_err(|_| Forged)?;
        message.resize(length);
        Ok(())
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seal").field("next", &self.next).finish_non_exhaustive()
    }
}

/// Weights of 61 bits, in pieces of 21, so that a processor multiplies several at a time.
struct Weights([Zeroizing<Vec<u32>>; 3]);

impl Weights {
    /// Sums of this many products, of 21 and 32 bits, fit in 63 bits.
    const CHUNK: usize = 1 << 10;

    fn new(random: &[u8]) -> Self {
        let weights = random.as_chunks().0.iter().map(|w| u64::from_le_bytes(*w) & MODULUS);
        let piece = |weight: u64, piece: u32| {
            (weight >> (piece * LIMB_BITS)) as u32 & ((1 << LIMB_BITS) - 1)
        };
        let pieces = |n| weights.clone().map(|weight| piece(weight, n)).collect();
        Self([0, 1, 2].map(|n| Zeroizing::new(pieces(n))))
    }

    fn one(&self, place: usize) -> u64 {
        let [low, middle, high] = [0, 1, 2].map(|piece| u64::from(self.0[piece][place]));
        low + (middle << LIMB_BITS) + (high << (2 * LIMB_BITS))
    }

    /// The sum of w(j) x(j) from lane `first` on. `products` gives that of a chunk's pieces.
    fn sum(
        &self,
        first: usize,
        lanes: &[[u8; 4]],
        products: fn(&[u32], &[[u8; 4]]) -> i64,
    ) -> i128 {
        let [low, middle, high] = [0, 1, 2].map(|piece| -> i128 {
            let chunks = self.0[piece][first..].chunks(Self::CHUNK).zip(lanes.chunks(Self::CHUNK));
            chunks.map(|(pieces, lanes)| i128::from(products(pieces, lanes))).sum()
        });
        low + (middle << LIMB_BITS) + (high << (2 * LIMB_BITS))
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn products(pieces: &[u32], lanes: &[[u8; 4]]) -> i64 {
    let lanes = lanes.iter().map(|lane| i64::from(u32::from_le_bytes(*lane)));
    pieces.iter().zip(lanes).map(|(piece, lane)| i64::from(*piece) * lane).sum()
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn signed_products(pieces: &[u32], lanes: &[[u8; 4]]) -> i64 {
    let lanes = lanes.iter().map(|lane| i64::from(i32::from_le_bytes(*lane)));
    pieces.iter().zip(lanes).map(|(piece, lane)| i64::from(*piece) * lane).sum()
}

/// What a key adds to tags modulo p, before they are cut into lanes: otherwise carries between
/// these would depend on the weights. It is from the second half of the message's counters.
fn blind(cipher: &Aes256Enc, id: (u32, u64)) -> u128 {
    let mut block = counter(id);
    block[12] = 0x80;
    let mut block = block.into();
    cipher.encrypt_block(&mut block);
    u128::from_le_bytes(block.into()) % u128::from(MODULUS)
}

fn counter((ring, number): (u32, u64)) -> [u8; 16] {
    let mut counter = [0; 16];
    counter[..4].copy_from_slice(&ring.to_le_bytes());
    counter[4..12].copy_from_slice(&number.to_le_bytes());
    counter
}

fn key(root: &Hkdf<Sha256>, label: &str, place: u32) -> Key {
    let mut key = Key::default();
    let info = [label.as_bytes(), &place.to_le_bytes()];
    root.expand_multi_info(&info, &mut *key).expect("HKDF gives up to 8,160 bytes");
    key
}

fn cipher<C: KeyInit + KeySizeUser<KeySize = U32>>(
    root: &Hkdf<Sha256>,
    label: &str,
    place: u32,
) -> C {
    C::new((&*key(root, label, place)).into())
}

/// Blocks of a message's pad, from block `first` on: AES-256 in counter mode. `encrypt_blocks`
/// takes half the time of the crate `ctr`, which copies each block several times.
fn pad(cipher: &Aes256Enc, id: (u32, u64), first: u32, pad: &mut [[u8; BLOCK_BYTES]]) {
    let mut block = counter(id);
    for (place, out) in (first..).zip(&mut *pad) {
        block[12..].copy_from_slice(&place.to_be_bytes());
        *out = block;
    }
    cipher.encrypt_blocks(Block::cast_slice_from_core_mut(pad));
}

fn subtract_lanes(lanes: &mut [u8], less: &[u8]) {
    for (lane, less) in lanes.as_chunks_mut::<4>().0.iter_mut().zip(less.as_chunks().0) {
        *lane = u32::from_le_bytes(*lane).wrapping_sub(u32::from_le_bytes(*less)).to_le_bytes();
    }
}

/// Adds the pads of some keys to the lanes, and subtracts those of others.
fn change(
    lanes: &mut [u8],
    id: (u32, u64),
    plus: [Option<&Aes256Enc>; 2],
    minus: [Option<&Aes256Enc>; 2],
) {
    let mut blocks = [[0; BLOCK_BYTES]; BATCH];
    for (batch, lanes) in (0..).step_by(BATCH).zip(lanes.chunks_mut(BATCH * BLOCK_BYTES)) {
        let blocks = &mut blocks[..lanes.len().div_ceil(BLOCK_BYTES)];
        for cipher in plus.into_iter().flatten() {
            pad(cipher, id, batch, blocks);
            add_lanes(lanes, blocks.as_flattened());
        }
        for cipher in minus.into_iter().flatten() {
            pad(cipher, id, batch, blocks);
            subtract_lanes(lanes, blocks.as_flattened());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNTAGGED: usize = 8;

    fn secret() -> Secret {
        Secret::new("sixteen or more!").unwrap()
    }

    fn root(session: u8) -> Hkdf<Sha256> {
        Hkdf::new(None, &[session])
    }

    fn seals(ranks: u32, session: u8) -> Vec<Seal> {
        (0..ranks).map(|rank| Seal::new(&root(session), (rank, ranks), (2, 4096))).collect()
    }

    #[test]
    fn pads_are_those_of_counter_mode() {
        use ctr::cipher::{InnerIvInit, StreamCipher, StreamCipherCoreWrapper};
        let (cipher, id) = (cipher::<Aes256Enc>(&root(1), "pad", 3), (7, 1 << 40));
        let mut expected = vec![0; 3 * BATCH * BLOCK_BYTES + 4];
        let core = ctr::CtrCore::inner_iv_init(cipher.clone(), &counter(id).into());
        let mut stream: ctr::Ctr32BE<Aes256Enc> = StreamCipherCoreWrapper::from_core(core);
        stream.apply_keystream(&mut expected);
        let mut lanes = vec![0; expected.len()];
        change(&mut lanes, id, [Some(&cipher), None], [None; 2]);
        assert!(lanes == expected);
        change(&mut lanes, id, [None; 2], [None, Some(&cipher)]);
        assert!(lanes.iter().all(|byte| *byte == 0));
    }

    /// A rank's lanes, of which N fit: small, and negative where they may be.
    fn lanes(ranks: u32, signs: Signs, words: &[u32], rank: u32) -> Vec<u8> {
        let (least, most) = (-(1i64 << 31) / i64::from(ranks), (1i64 << 32) / i64::from(ranks) - 1);
        let lane = |(i, word): (usize, &u32)| {
            let word = i64::from(word.rotate_left(rank));
            let is_signed = match signs {
                Signs::Signed => true,
                Signs::Unsigned => false,
                Signs::One { place, of } => i % of == place,
            };
            let lane = if is_signed { least + word % -(2 * least) } else { word % (most + 1) };
            (lane as u32).to_le_bytes()
        };
        words.iter().enumerate().flat_map(lane).collect()
    }

    /// What the box releases for the messages of a number, and the messages.
    fn sum(
        seals: &mut [Seal],
        id: (u32, u64),
        signs: Signs,
        words: &[u32],
    ) -> (Vec<u8>, Vec<Vec<u8>>) {
        let ranks = seals.len() as u32;
        let message = |(rank, seal): (u32, &mut Seal)| {
            let mut message = Buffer::from(vec![0; UNTAGGED]);
            message.extend_from_slice(&lanes(ranks, signs, words, rank));
            seal.close(id, UNTAGGED, (0, signs), &mut message);
            message.into_vec()
        };
        let messages: Vec<_> = (0..).zip(seals).map(message).collect();
        let mut sum = vec![0; messages[0].len()];
        messages.iter().for_each(|message| add_lanes(&mut sum, message));
        (sum, messages)
    }

    fn opened(seal: &Seal, id: (u32, u64), signs: Signs, sum: &[u8]) -> Option<Vec<u8>> {
        let mut sum = sum.to_vec();
        seal.open(id, &mut sum);
        let (lanes, tag) = sum[UNTAGGED..].split_at(sum.len() - UNTAGGED - TAG_BYTES);
        seal.is_right(id, tag, lanes, (0, signs)).then(|| lanes.to_vec())
    }

    fn signs() -> impl Strategy<Value = Signs> {
        prop_oneof![
            Just(Signs::Signed),
            Just(Signs::Unsigned),
            (1usize..4).prop_flat_map(|of| (0..of).prop_map(move |place| Signs::One { place, of })),
        ]
    }

    proptest! {
        #[test]
        fn every_rank_opens_the_sum(
            ranks in 1u32..65,
            signs in signs(),
            words in prop::collection::vec(any::<u32>(), 0..300),
        ) {
            let mut seals = seals(ranks, 0);
            for id in [(0, 0), (1, 0), (0, 1)] {
                let (sealed, _) = sum(&mut seals, id, signs, &words);
                let mut expected = vec![0; words.len() * 4];
                (0..ranks).for_each(|r| add_lanes(&mut expected, &lanes(ranks, signs, &words, r)));
                for seal in &seals {
                    let opened = opened(seal, id, signs, &sealed);
                    prop_assert_eq!(opened.as_ref(), Some(&expected));
                }
            }
        }

        #[test]
        fn a_changed_sum_is_found(
            ranks in 1u32..9, signs in signs(), words in prop::collection::vec(any::<u32>(), 1..99),
            place in any::<prop::sample::Index>(), change in 1u32..,
        ) {
            let mut seals = seals(ranks, 0);
            let (right, messages) = sum(&mut seals, (0, 0), signs, &words);
            let mut changed = right.clone();
            let at = UNTAGGED + place.index((right.len() - UNTAGGED) / 4) * 4;
            add_lanes(&mut changed[at..at + 4], &change.to_le_bytes());
            let mut doubled = right.clone();
            add_lanes(&mut doubled, &messages[place.index(messages.len())]);
            let (other_ring, _) = sum(&mut seals, (1, 0), signs, &words);
            let (next, _) = sum(&mut seals, (0, 1), signs, &words);
            for forged in [changed, doubled, other_ring, next.clone()] {
                prop_assert_eq!(opened(&seals[0], (0, 0), signs, &forged), None);
            }
            prop_assert_eq!(opened(&seals[0], (0, 1), signs, &right), None);
        }

        #[test]
        fn a_message_that_no_box_has_summed_is_recognised(ranks in 2u32..9, rank in 0u32..9) {
            let (mut seals, rank) = (seals(ranks, 0), rank % ranks);
            let words = [1, 2, 3];
            let (_, messages) = sum(&mut seals, (0, 0), Signs::Signed, &words);
            let previous = (rank + ranks - 1) % ranks;
            let (seal, mut message) = (&seals[rank as usize], messages[previous as usize].clone());
            seal.open((0, 0), &mut message);
            seal.reopen((0, 0), &mut message);
            let lanes = lanes(ranks, Signs::Signed, &words, previous);
            prop_assert_eq!(&message[UNTAGGED..][..12], &lanes[..]);
        }
    }

    #[test]
    #[should_panic(expected = "a message of ring 1 is built twice")]
    fn no_pad_covers_two_contents() {
        let mut seal = seals(2, 0).remove(0);
        for number in [0, 1, 1] {
            seal.close((1, number), 0, (0, Signs::Signed), &mut Buffer::from(vec![0; 4]));
        }
    }

    /// Messages and sums of zeros, over ranks, rings, numbers and sessions, and differences of
    /// those that would cancel a pad.
    #[test]
    fn the_wire_carries_uniform_bytes() {
        let (mut contributions, mut sums) = (vec![0u32; 256], vec![0u32; 256]);
        let mut differences = vec![0u32; 256];
        let zeros = [0; 64];
        for session in 0..40 {
            let mut seals = seals(4, session * 4);
            let mut last: Option<Vec<u8>> = None;
            for (ring, number) in (0..2).flat_map(|ring| (0..10).map(move |n| (ring, n))) {
                let (sum, messages) = sum(&mut seals, (ring, number), Signs::Unsigned, &zeros);
                messages.iter().flatten().for_each(|b| contributions[usize::from(*b)] += 1);
                sum.iter().for_each(|b| sums[usize::from(*b)] += 1);
                let before = last.replace(sum.clone());
                let pairs = before.iter().flatten().zip(&sum);
                pairs.for_each(|(a, b)| differences[usize::from(a.wrapping_sub(*b))] += 1);
            }
        }
        for counts in [contributions, sums, differences] {
            let expected = f64::from(counts.iter().sum::<u32>()) / 256.0;
            let of = |count: &u32| (f64::from(*count) - expected).powi(2) / expected;
            let chi_square: f64 = counts.iter().map(of).sum();
            // 255 degrees of freedom: once in a million runs beyond these, were it random.
            assert!((157.0..377.0).contains(&chi_square), "{chi_square}");
        }
    }

    #[test]
    fn sessions_and_ranks_have_keys_of_their_own() {
        let of = |session| {
            let root = root(session);
            let labels = ["list", "hop", "pad", "bypass", "sum", "tag", "session"].into_iter();
            let labels = labels.flat_map(|label| (0..3).map(move |place| (label, place)));
            labels.map(move |(label, place)| *key(&root, label, place)).collect::<Vec<_>>()
        };
        let all = [of(0), of(4)].concat();
        let unique: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(unique.len(), all.len());
        assert!(Secret::new("fifteen letters").is_err());
        assert_eq!(format!("{:?}", secret()), "Secret");
    }

    #[test]
    fn bypass_messages_are_opened_in_their_order_by_the_next_rank() {
        let mut seals = seals(3, 0);
        let mut messages: Vec<Vec<u8>> = Vec::new();
        for text in ["", "one", "a longer message, of two blocks of the key stream and a rest..."] {
            let mut message = Buffer::from(text.as_bytes().to_vec());
            seals[1].close_bypass(&mut message);
            messages.push(message.into_vec());
        }
        let open = |seal: &mut Seal, message: &[u8]| {
            let mut message = Buffer::from(message.to_vec());
            seal.open_bypass(&mut message).map(|()| message.into_vec())
        };
        assert_eq!(open(&mut seals[0], &messages[0]), Err(Forged), "of rank 2 only");
        assert_eq!(open(&mut seals[2], &messages[0]).as_deref(), Ok(&b""[..]));
        assert_eq!(open(&mut seals[2], &messages[1]).as_deref(), Ok(&b"one"[..]));
        assert_eq!(open(&mut seals[2], &messages[1]), Err(Forged), "a replay");
        for at in [0, 40, messages[2].len() - 1] {
            let mut seal = seals_of_two_messages();
            let mut changed = messages[2].clone();
            changed[at] ^= 1;
            assert_eq!(open(&mut seal, &changed), Err(Forged), "byte {at}");
        }
        assert_eq!(open(&mut seals_of_two_messages(), &messages[2][..15]), Err(Forged));
        assert!(open(&mut seals_of_two_messages(), &messages[2]).is_ok());
    }

    /// Rank 2, which has opened two messages.
    fn seals_of_two_messages() -> Seal {
        let mut seal = seals(3, 0).remove(2);
        seal.incoming.count = 2;
        seal
    }
}
