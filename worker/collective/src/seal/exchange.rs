//! The key exchange of a sealed session, at one rank. [`crate::seal`] has the protocol.

use std::fmt;

use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes256Gcm, Nonce, Tag};
use hkdf::Hkdf;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

use super::{Forged, Seal, Secret, key};

/// A rank's public key of a session, of X25519.
pub type PublicKey = [u8; 32];
/// That the sender of a list has the secret.
pub type Proof = [u8; 32];
/// The group key and a tag, for the next rank.
pub type SealedKey = [u8; 48];
/// 32 random bytes of rank 0, which only the ranks of the session know.
pub type GroupKey = Zeroizing<[u8; 32]>;

/// What a rank brings to one sealed session. It cannot be copied: a reconnect draws another one.
pub struct Share {
    secret: Secret,
    /// A hash of what names the session's ranks: the job, the group.
    context: [u8; 32],
    /// X25519 is used twice, with both neighbours, so it is not the crate's `EphemeralSecret`.
    private: StaticSecret,
    group: GroupKey,
}

impl Share {
    /// `names` of the session, the same at all its ranks. The random bytes must come from the
    /// system, and never be used again: this rank's private key, and the group key of rank 0.
    pub fn new(secret: Secret, names: &[&str], random: &Zeroizing<[u8; 64]>) -> Self {
        let mut context = Sha256::new();
        for name in names {
            context.update((name.len() as u64).to_le_bytes());
            context.update(name);
        }
        let (mut private, mut group) = (Zeroizing::new([0; 32]), GroupKey::default());
        private.copy_from_slice(&random[..32]);
        group.copy_from_slice(&random[32..]);
        Self {
            secret,
            context: context.finalize().into(),
            private: StaticSecret::from(*private),
            group,
        }
    }
}

/// Does not print it.
impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Share")
    }
}

/// A rank's part in the exchange. Forget it when the session opens.
pub struct Exchange {
    share: Share,
    public: PublicKey,
    rank: u32,
    /// Of what the ranks must agree on.
    agreed: Sha256,
}

impl Exchange {
    /// `job` has all that the ranks must agree on.
    pub fn new(share: Share, job: &[u8], rank: u32) -> Self {
        let mut agreed = Sha256::new_with_prefix(b"netsum sealed sums 2");
        agreed.update(share.context);
        agreed.update((job.len() as u64).to_le_bytes());
        agreed.update(job);
        let public = x25519_dalek::PublicKey::from(&share.private).to_bytes();
        Self { share, public, rank, agreed }
    }

    pub fn public(&self) -> PublicKey {
        self.public
    }

    pub fn group_key(&self) -> &GroupKey {
        &self.share.group
    }

    /// Of the secret and another one, for a list.
    fn root(&self, list: &[PublicKey], other: &[u8]) -> Hkdf<Sha256> {
        let salt = self.agreed.clone().chain_update(list.as_flattened()).finalize();
        let input = Zeroizing::new([&*self.share.secret.0, other].concat());
        Hkdf::new(Some(&salt), &input)
    }

    fn mac(&self, list: &[PublicKey]) -> Hmac<Sha256> {
        let key = key(&self.root(&[], &[]), "list", 0);
        let mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&*key).expect("any length will do");
        mac.chain_update(list.as_flattened())
    }

    /// For a list that ends with this rank, and that it believes.
    pub fn prove(&self, list: &[PublicKey]) -> Proof {
        self.mac(list).finalize().into_bytes().into()
    }

    /// Whether a rank with the secret believes this list.
    ///
    /// # Errors
    /// If not.
    pub fn verify(&self, list: &[PublicKey], proof: &Proof) -> Result<(), Forged> {
        self.mac(list).verify_slice(proof).map_err(|_| Forged)
    }

    /// The cipher for the one message from a rank to the next, this one or its neighbour.
    fn hop(&self, list: &[PublicKey], from: usize, neighbour: usize) -> Result<Aes256Gcm, Forged> {
        let shared = self.share.private.diffie_hellman(&list[neighbour].into());
        let is_right = shared.was_contributory();
        let root = self.root(list, shared.as_bytes());
        let key = key(&root, "hop", from as u32);
        is_right.then(|| Aes256Gcm::new((&*key).into())).ok_or(Forged)
    }

    /// Seals the group key to the next rank, once for each exchange.
    ///
    /// # Errors
    /// If the next rank's public key is one of those that give no secret (RFC 7748, section 6.1).
    pub fn pass(&self, list: &[PublicKey], group: &GroupKey) -> Result<SealedKey, Forged> {
        let rank = self.rank as usize;
        let cipher = self.hop(list, rank, (rank + 1) % list.len())?;
        let mut sealed = [0; 48];
        let (text, tag) = sealed.split_at_mut(32);
        text.copy_from_slice(&**group);
        let made = cipher.encrypt_inout_detached(&Nonce::default(), &[], text.into());
        tag.copy_from_slice(&made.map_err(|_| Forged)?);
        Ok(sealed)
    }

    /// Opens the previous rank's group key.
    ///
    /// # Errors
    /// If it is not that rank's, for this list and this session.
    pub fn take(&self, list: &[PublicKey], sealed: &SealedKey) -> Result<GroupKey, Forged> {
        let previous = (self.rank as usize + list.len() - 1) % list.len();
        let cipher = self.hop(list, previous, previous)?;
        let mut group = GroupKey::default();
        let (text, tag) = sealed.split_at(32);
        group.copy_from_slice(text);
        let tag = Tag::try_from(tag).map_err(|_| Forged)?;
        let opened =
            cipher.decrypt_inout_detached(&Nonce::default(), &[], (&mut group[..]).into(), &tag);
        opened.map(|()| group).map_err(|_| Forged)
    }

    /// The session's keys, for so many rings, and messages of up to so many bytes.
    pub fn seal(&self, list: &[PublicKey], group: &GroupKey, sizes: (u32, usize)) -> Seal {
        Seal::new(&self.root(list, &**group), (self.rank, list.len() as u32), sizes)
    }
}

/// Does not print it.
impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
    use crate::numeric::signs::Signs;

    /// A rank of a job, whose random bytes are all alike.
    fn rank(rank: u32, random: u8) -> Exchange {
        of("a secret of tests", &["job"], b"shape", rank, random)
    }

    fn of(secret: &str, names: &[&str], job: &[u8], rank: u32, random: u8) -> Exchange {
        let share = Share::new(Secret::new(secret).unwrap(), names, &Zeroizing::new([random; 64]));
        Exchange::new(share, job, rank)
    }

    fn job(ranks: u32) -> (Vec<Exchange>, Vec<PublicKey>) {
        let ranks: Vec<_> = (0..ranks).map(|n| rank(n, 1 + n as u8)).collect();
        let list = ranks.iter().map(Exchange::public).collect();
        (ranks, list)
    }

    /// What each rank passes to the next.
    fn passed(ranks: &[Exchange], list: &[PublicKey]) -> Vec<SealedKey> {
        let group = ranks[0].group_key();
        ranks.iter().map(|rank| rank.pass(list, group).unwrap()).collect()
    }

    #[test]
    fn all_ranks_get_the_group_key_and_the_same_session() {
        for ranks in 1..9 {
            let (ranks, list) = job(ranks);
            let mut group = ranks[0].group_key().clone();
            for (n, rank) in ranks.iter().enumerate() {
                assert_eq!(rank.verify(&list[..n], &ranks[0].prove(&list[..n])), Ok(()));
                let passed = rank.pass(&list, &group).unwrap();
                group = ranks[(n + 1) % ranks.len()].take(&list, &passed).unwrap();
            }
            assert_eq!(group, *ranks[0].group_key(), "it has gone around");
            let session = |rank: &Exchange| rank.seal(&list, &group, (1, 64)).session();
            assert!(ranks.iter().all(|rank| session(rank) == session(&ranks[0])));
        }
    }

    /// Somebody who learns the secret, and has recorded all frames.
    #[test]
    fn a_recording_is_not_opened_by_the_secret_alone() {
        let (ranks, list) = job(3);
        for (n, passed) in passed(&ranks, &list).iter().enumerate() {
            let next = (n as u32 + 1) % 3;
            assert!(ranks[next as usize].take(&list, passed).is_ok());
            for place in 0..3 {
                assert_eq!(rank(place, 9).take(&list, passed), Err(Forged), "{n} at {place}");
            }
        }
    }

    #[test]
    fn pads_differ_though_secret_and_list_are_the_same() {
        let (ranks, list) = job(3);
        let message = |group: u8| {
            let mut seal = ranks[1].seal(&list, &GroupKey::new([group; 32]), (1, 64));
            let mut message = Buffer::from(vec![0; 32]);
            seal.close((0, 0), 0, (0, Signs::Signed), &mut message);
            message.into_vec()
        };
        assert_eq!(message(1), message(1));
        assert_ne!(message(1)[..32], message(2)[..32]);
    }

    #[test]
    fn each_changed_byte_is_found() {
        let (ranks, list) = job(3);
        let proof = ranks[1].prove(&list[..2]);
        let passed = passed(&ranks, &list)[0];
        let changed = |list: &[PublicKey], at: usize| {
            let mut list = list.to_vec();
            list.as_flattened_mut()[at] ^= 1;
            list
        };
        for at in 0..64 {
            assert_eq!(ranks[2].verify(&changed(&list[..2], at), &proof), Err(Forged));
        }
        for at in 0..96 {
            assert_eq!(ranks[1].take(&changed(&list, at), &passed), Err(Forged));
        }
        for at in 0..32 {
            let mut proof = proof;
            proof[at] ^= 1;
            assert_eq!(ranks[2].verify(&list[..2], &proof), Err(Forged));
        }
        for at in 0..48 {
            let mut passed = passed;
            passed[at] ^= 1;
            assert_eq!(ranks[1].take(&list, &passed), Err(Forged));
        }
        assert_eq!(ranks[2].verify(&list[..1], &proof), Err(Forged));
        assert_eq!(ranks[2].take(&list, &passed), Err(Forged), "of rank 1");
    }

    #[test]
    fn ranks_with_other_secrets_names_or_shapes_refuse_each_other() {
        let (ranks, list) = job(2);
        let passed = ranks[0].pass(&list, ranks[0].group_key()).unwrap();
        let proof = ranks[0].prove(&list[..1]);
        for (secret, names, job) in [
            ("another secret here", &["job"][..], &b"shape"[..]),
            ("a secret of tests", &["jo", "b"], b"shape"),
            ("a secret of tests", &["other"], b"shape"),
            ("a secret of tests", &["job"], b"other"),
        ] {
            let other = of(secret, names, job, 1, 2);
            assert_eq!(other.public(), list[1]);
            assert_eq!(other.verify(&list[..1], &proof), Err(Forged));
            assert_eq!(other.take(&list, &passed), Err(Forged));
        }
    }

    /// Points of a low order (D. J. Bernstein, "Curve25519: new Diffie-Hellman speed records").
    #[test]
    fn public_keys_that_give_no_secret_are_refused() {
        let (ranks, list) = job(2);
        let mut one = [0; 32];
        one[0] = 1;
        let (mut minus_one, mut zero) = ([0xff; 32], [0xff; 32]);
        (minus_one[0], minus_one[31], zero[0], zero[31]) = (0xec, 0x7f, 0xed, 0x7f);
        for point in [[0; 32], one, minus_one, zero] {
            let list = [list[0], point];
            assert_eq!(ranks[0].pass(&list, ranks[0].group_key()), Err(Forged));
            // The cipher of a secret of zeros, which the holder of the job's secret knows.
            let root = ranks[0].root(&list, &[0; 32]);
            let cipher = Aes256Gcm::new((&*key(&root, "hop", 1)).into());
            let mut sealed = [0; 48];
            let tag =
                cipher.encrypt_inout_detached(&Nonce::default(), &[], (&mut sealed[..32]).into());
            sealed[32..].copy_from_slice(&tag.unwrap());
            assert_eq!(ranks[0].take(&list, &sealed), Err(Forged));
        }
    }

    #[test]
    fn nothing_secret_is_printed() {
        let exchange = rank(0, 1);
        assert_eq!(format!("{:?} {exchange:?}", exchange.share), "Share Exchange { rank: 0, .. }");
    }
}
