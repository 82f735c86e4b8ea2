//! First packets of jobs that are set up in band.

use anyhow::Result;
use netsum_common::abi::{
    Claim, ClaimKey, ConnectionKey, InBandJob, MAX_ENDED_FLOWS, Token, features, maps,
};
use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::{InBandToken, JobHeader};
use netsum_core::plane::{FirstPacket, unmapped};

use super::bpf::{BpfDataPlane, found, ignore_missing};

impl BpfDataPlane {
    pub(super) fn add_token(&mut self, token: InBandToken, job: InBandJob) -> Result<()> {
        self.hash(maps::TOKENS)?.insert(Token::new(token), job, 0)?;
        self.set_features(features::FIRST_PACKETS, true)
    }

    pub(super) fn remove_token(&mut self, token: InBandToken) -> Result<()> {
        let mut tokens = self.hash::<Token, InBandJob>(maps::TOKENS)?;
        let Some(job) = found(tokens.get(&Token::new(token), 0))? else { return Ok(()) };
        ignore_missing(tokens.remove(&Token::new(token)))?;
        // Until then a program may still find the token and add a waiting connection.
        self.wait_for_programs()?;
        let waiting = self.hash::<ConnectionKey, u32>(maps::PENDING_CONNS)?;
        let all: Vec<(ConnectionKey, u32)> = waiting.iter().collect::<Result<_, _>>()?;
        // Only a few for each ring and rank. A holder of the token can fill the table with forged
        // connections, and other flows need the room.
        let room = MAX_ENDED_FLOWS.saturating_sub(self.ended.len() as u32);
        let most = (job.ranks * job.rings * 16).min(room) as usize;
        for (n, (c, _)) in all.iter().filter(|(_, number)| *number == job.job.0).enumerate() {
            if n < most {
                self.end_connection(c)?;
            }
            ignore_missing(self.hash::<ConnectionKey, u32>(maps::PENDING_CONNS)?.remove(c))?;
        }
        let tokens = self.hash::<Token, InBandJob>(maps::TOKENS)?;
        if tokens.keys().next().is_none() {
            self.set_features(features::FIRST_PACKETS, false)?;
        }
        Ok(())
    }

    pub(super) fn take_first_packets(&mut self) -> Result<Vec<FirstPacket>> {
        let mut claims = self.hash::<ClaimKey, Claim>(maps::CLAIMS)?;
        let keys: Vec<ClaimKey> = claims.keys().collect::<Result<_, _>>()?;
        let mut packets = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(claim) = found(claims.get(&key, 0))? else { continue };
            ignore_missing(claims.remove(&key))?;
            packets.extend(first_packet(&key, &claim));
        }
        Ok(packets)
    }
}

/// Always `Some`: the data plane notes only packets with a header.
fn first_packet(key: &ClaimKey, claim: &Claim) -> Option<FirstPacket> {
    let header: Vec<u8> = claim.header.iter().flat_map(|w| w.to_le_bytes()).collect();
    Some(FirstPacket {
        job: key.job,
        header: JobHeader::decode(header.first_chunk()?)?,
        ifindex: key.ifindex,
        src: unmapped(claim.connection.src_ip),
        src_mac: claim.src_mac,
        dst: unmapped(claim.connection.dst_ip),
        qpn: Qpn::checked(claim.connection.qpn)?,
        psn: Psn::new(claim.psn),
        len: claim.len,
        only: claim.only != 0,
    })
}
