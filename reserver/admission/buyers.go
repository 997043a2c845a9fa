package admission

import (
	"context"
	"hash/maphash"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
)

const (
	filterBits = 1 << 24 // 2 MiB: of a million buyers who have nothing, a few thousand are asked for in vain
	filterKeys = 4
	// settledAfter is how long after it was made a reservation may still appear: its transaction commits later, and has less.
	settledAfter = 10 * time.Second
	restartAfter = 3 * time.Second // of not finding reservations that there are, to look for them from the beginning
)

// Buyers remembers who has had a reservation, in a Bloom filter (Bloom 1970): it may take a buyer for one who has, and never the
// other way round, as far as it has seen the reservations. Reads take no lock.
type Buyers struct {
	bits [filterBits / 64]atomic.Uint64
	seed maphash.Seed

	// What has been read of the database, by the watch alone.
	settled  uuid.UUID // reservations up to here are all seen
	below    int64     // how many those are
	complete int64     // how many reservations there were when all were seen; -1 for never
	missing  time.Time // since when some are missing
	next     time.Time // not to be read again before
}

func newBuyers() *Buyers { return &Buyers{seed: maphash.MakeSeed(), complete: -1} }

// places gives the words and bits of a buyer.
func (b *Buyers) places(buyer string) (h, step uint64) {
	h = maphash.String(b.seed, buyer)
	return h, h>>32 | 1 // Kirsch and Mitzenmacher 2006: two hashes make any number
}

// Add remembers a buyer.
func (b *Buyers) Add(buyer string) {
	h, step := b.places(buyer)
	for range filterKeys {
		at := h % filterBits
		if word, bit := &b.bits[at/64], uint64(1)<<(at%64); word.Load()&bit == 0 {
			word.Or(bit)
		}
		h += step
	}
}

// MayHave is false for a buyer who was never added.
func (b *Buyers) MayHave(buyer string) bool {
	h, step := b.places(buyer)
	for range filterKeys {
		at := h % filterBits
		if b.bits[at/64].Load()&(1<<(at%64)) == 0 {
			return false
		}
		h += step
	}
	return true
}

// allKnown says whether every buyer who had a reservation at the view's instant was added, and reads the newest when that can
// be brought about at small cost. Reservations appear in about the order of their ids, not quite: the last seconds are read
// again, and only when as many were seen as were counted are they all.
func (b *Buyers) allKnown(ctx context.Context, store *inventory.Store, v *View) (bool, error) {
	switch {
	case v.Granted == b.complete:
		return true, nil
	case v.Arrived.Before(b.next), v.Available > 0 && v.Gate(v.Now) == inventory.GateOpen: // memory has nothing to refuse
		return false, nil
	}
	began := time.Now()
	settled := inventory.FirstID(v.Now.Add(-settledAfter))
	seen, after := b.below, b.settled
	var total int64
	for {
		n, granted, err := store.BuyersAfter(ctx, v.ID, after, func(reservation uuid.UUID, buyer string) {
			b.Add(buyer)
			seen++
			after = reservation
			if string(reservation[:]) < string(settled[:]) {
				b.below, b.settled = seen, reservation
			}
		})
		if err != nil {
			return false, err
		}
		if n > 0 {
			total = granted
		}
		if n < inventory.BuyersLimit {
			break
		}
	}
	if total == 0 {
		total = v.Granted // none is newer than those that were seen before
	}
	b.next = time.Now().Add(min(9*time.Since(began), time.Second))
	if seen == total {
		b.complete, b.missing = total, time.Time{}
		return true, nil
	}
	switch {
	case b.missing.IsZero():
		b.missing = began
	case began.Sub(b.missing) > restartAfter:
		b.settled, b.below, b.missing = uuid.Nil, 0, time.Time{}
		b.next = time.Now().Add(restartAfter)
	}
	return false, nil
}
