//! The nonces of a sealed session, which go around the ring twice: [`crate::seal`] says why.

use super::Engine;
use crate::buffer::Buffer;
use crate::channels::Channels;
use crate::error::Error;
use crate::frame::{Descriptor, Frame};
use crate::seal::{Nonce, Seal, Share};

impl Engine {
    pub(super) fn on_nonces(&mut self, channels: &mut dyn Channels, mut nonces: Vec<Nonce>) {
        let (rank, ranks) = (self.member.rank as usize, self.member.ranks as usize);
        match (self.settings.share, &mut self.seal) {
            // The first time around: up to this rank.
            (Some(share), None) if nonces.len() == rank => {
                nonces.push(share.nonce);
                self.tell(channels, &Frame::Nonces(nonces));
            }
            // The list is complete.
            (Some(share), None) if nonces.len() == ranks && nonces[rank] == share.nonce => {
                self.begin_sealed(channels, share, nonces);
            }
            // It has gone around twice.
            (_, Some(seal)) if rank == 0 && !seal.opens && seal.nonces() == nonces => {
                seal.opens = true;
            }
            _ => {
                let previous = self.rank_of(self.previous());
                let text = format!(
                    "rank {previous} sent nonces of another session than rank {}'s, or somebody \
                     replayed or changed them",
                    self.own_rank()
                );
                self.fail(channels, Error::Protocol(text));
            }
        }
    }

    fn begin_sealed(&mut self, channels: &mut dyn Channels, share: Share, nonces: Vec<Nonce>) {
        // The next rank opens what comes after the list.
        self.tell(channels, &Frame::Nonces(nonces.clone()));
        let shape = &self.settings.shape;
        let (rank, rings) = (self.member.rank, shape.layout.rings);
        let mut seal = Seal::new(share.secret, nonces, rank, rings, shape.message_room());
        seal.opens = rank != 0;
        self.session = Some(seal.session());
        self.seal = Some(seal);
        // Another secret shows at once.
        self.tell_status(channels);
        let open: Vec<Descriptor> = self.operations.iter().map(|o| o.descriptor).collect();
        open.into_iter().for_each(|d| self.tell(channels, &Frame::Operation(d)));
    }

    /// Whether a message of the previous rank is from it.
    pub(super) fn open_bypass(&mut self, frame: &mut Buffer) -> bool {
        match self.seal.as_mut().filter(|seal| seal.opens) {
            Some(seal) => seal.open_bypass(frame).is_ok(),
            None => true,
        }
    }

    pub(super) fn on_forged_frame(&mut self, channels: &mut dyn Channels) {
        let text = format!(
            "rank {} cannot open what rank {} sends: NETSUM_SECRET must be the same at all ranks, \
             or somebody has changed it on its way",
            self.own_rank(),
            self.rank_of(self.previous())
        );
        self.fail(channels, Error::Mismatch(text));
    }
}
