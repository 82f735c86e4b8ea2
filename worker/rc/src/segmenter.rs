//! The segmenter cuts the messages of a queue pair into packets, and keeps them until they are
//! acknowledged.

use std::collections::VecDeque;

use netsum_common::wire::{Opcode, Reth};

use super::Operation;
use super::rtt::PACKET_OVERHEAD;

#[derive(Debug)]
struct Message {
    id: u64,
    data: Vec<u8>,
    operation: Operation,
    immediate: Option<u32>,
    first: u64,
    packets: u64,
}

/// A packet of a message.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub opcode: Opcode,
    pub payload: &'a [u8],
    /// The address to write the message to, in its first packet.
    pub reth: Option<Reth>,
    /// The immediate data, in its last packet.
    pub immediate: Option<u32>,
    pub last: bool,
    /// From 0.
    pub in_message: u64,
}

/// Messages, oldest first.
#[derive(Debug)]
pub(super) struct Segmenter {
    mtu: usize,
    operation: Operation,
    messages: VecDeque<Message>,
    /// Packets of all messages that were ever posted.
    pub posted: u64,
}

impl Segmenter {
    pub fn new(mtu: usize, operation: Operation) -> Self {
        Self { mtu, operation, messages: VecDeque::new(), posted: 0 }
    }

    /// Without an operation a message uses the queue pair's own.
    pub fn post(
        &mut self,
        id: u64,
        data: Vec<u8>,
        operation: Option<Operation>,
        immediate: Option<u32>,
    ) {
        let operation = operation.unwrap_or(self.operation);
        let packets = data.len().div_ceil(self.mtu).max(1) as u64;
        self.messages.push_back(Message {
            id,
            data,
            operation,
            immediate,
            first: self.posted,
            packets,
        });
        self.posted += packets;
    }

    /// One after the last packet of a message.
    pub fn end(&self, id: u64) -> Option<u64> {
        self.messages.iter().rev().find(|m| m.id == id).map(|m| m.first + m.packets)
    }

    /// A packet of a message that is not acknowledged.
    pub fn packet(&self, n: u64) -> Option<Part<'_>> {
        let m = self.messages.get(self.messages.partition_point(|m| m.first + m.packets <= n))?;
        let in_message = n - m.first;
        let (first, last) = (in_message == 0, n + 1 == m.first + m.packets);
        let at = in_message as usize * self.mtu;
        let reth = match m.operation {
            Operation::Write { address, rkey } if first => {
                Some(Reth { address, rkey, length: m.data.len() as u32 })
            }
            _ => None,
        };
        let write = matches!(m.operation, Operation::Write { .. });
        Some(Part {
            opcode: Opcode::data(write, first, last, m.immediate.is_some()),
            payload: &m.data[at..m.data.len().min(at + self.mtu)],
            reth,
            immediate: m.immediate.filter(|_| last),
            last,
            in_message,
        })
    }

    /// Bytes on the wire of a range of packets, all of messages that are not acknowledged.
    pub fn bytes(&self, from: u64, to: u64) -> u64 {
        let mut bytes = 0;
        for m in self.messages.iter().take_while(|m| m.first < to) {
            let (first, end) = (from.max(m.first), to.min(m.first + m.packets));
            let payload =
                |packet: u64| ((packet - m.first) as usize * self.mtu).min(m.data.len()) as u64;
            if first < end {
                bytes += payload(end) - payload(first) + (end - first) * PACKET_OVERHEAD;
            }
        }
        bytes
    }

    /// All before this packet have arrived: removes messages that are complete.
    pub fn acknowledge(&mut self, packet: u64, done: &mut impl FnMut(u64, Vec<u8>)) {
        while let Some(m) = self.messages.pop_front_if(|m| m.first + m.packets <= packet) {
            done(m.id, m.data);
        }
    }

    /// The number of messages that are not acknowledged.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Messages that are not acknowledged, oldest first.
    pub fn into_messages(self) -> Vec<(u64, Vec<u8>)> {
        self.messages.into_iter().map(|m| (m.id, m.data)).collect()
    }
}
