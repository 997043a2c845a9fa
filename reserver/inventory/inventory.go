// Package inventory is the claim: the SQL that moves units of a sale between available, held and sold in MySQL, and
// the audit that proves from the rows that none was lost or sold twice. docs/claim.md explains the tables and statements.
//
// All times are UTC and come from the database's clock, at microsecond precision. All methods are safe for concurrent
// use, from any number of processes.
package inventory

import (
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// MaxQuantity is the most units one reservation can ask for.
const MaxQuantity = 1000

// MaxIDLength is the longest buyer or payment identifier, in bytes.
const MaxIDLength = 128

// Sale is what the reservation pods obey: the spec of a FlashSale as the manager wrote it last.
type Sale struct {
	ID          uuid.UUID // UID of the FlashSale object
	Name        string    // namespace/name, for people
	SKU         string
	Units       int64
	StartsAt    time.Time
	EndsAt      time.Time     // exclusive; zero means no end
	HoldTTL     time.Duration // how long a reservation unlocks checkout
	MaxPerBuyer int
	RefuseLate  bool // a payment for a lapsed hold is refunded, even when units are free
	// ReleaseAtEnd makes holds lapse at the end of the sale, when that comes before their time is over.
	ReleaseAtEnd bool
	Suspended    bool
	Draining     bool  // the object is being deleted: no new holds
	Generation   int64 // metadata.generation of the spec
}

// Counts are units by state; Available + Held + Sold is the number of unit rows loaded.
type Counts struct {
	Available int64 `json:"available"`
	Held      int64 `json:"held"`
	Sold      int64 `json:"sold"`
}

// Snapshot is a sale at one instant of the database's clock.
type Snapshot struct {
	Sale
	Counts
	Now       time.Time // the instant
	Granted   int64     // reservations ever made
	Loaded    int64     // unit rows loaded
	LoadedAt  time.Time // when the last one was in; zero while loading
	ClosedAt  time.Time // zero until closed
	NextLapse time.Time // no live hold expires before this; zero without one
	openedAt  time.Time // see OpenedAt; zero for most
	announced int       // the events of the sale that were written
	removed   int64     // unit rows that Shrink took away
}

// lastUnit is the highest number a unit can have: those of units that were taken away are not used again.
func (s *Snapshot) lastUnit() int64 { return s.Units + s.removed }

// lapse is when a hold lapses that is granted at the instant now.
func (s *Snapshot) lapse(now time.Time) time.Time {
	at := now.Add(s.HoldTTL)
	if s.ReleaseAtEnd && !s.EndsAt.IsZero() && s.EndsAt.Before(at) {
		return s.EndsAt
	}
	return at
}

// Gate says whether holds may be granted at an instant, and if not, why.
type Gate int

// The states of the gate.
const (
	GateOpen      Gate = iota
	GateNotOpen        // before the start, or units are still loading
	GateSuspended      // spec.suspend
	GateClosed         // at or after the end, closed, or draining
)

// Gate judges the sale's window at the instant now.
func (s *Snapshot) Gate(now time.Time) Gate {
	switch {
	case !s.ClosedAt.IsZero(), s.Draining, !s.EndsAt.IsZero() && !now.Before(s.EndsAt):
		return GateClosed
	case s.LoadedAt.IsZero(), now.Before(s.StartsAt):
		return GateNotOpen
	case s.Suspended:
		return GateSuspended
	}
	return GateOpen
}

// OpenedAt is when the sale opened: its start, the end of loading when that came later, or its resumption when it was
// suspended until then. Zero before.
func (s *Snapshot) OpenedAt() time.Time {
	if s.Suspended || !s.openedAt.IsZero() {
		return s.openedAt
	}
	opened := s.StartsAt
	if s.LoadedAt.After(opened) {
		opened = s.LoadedAt
	}
	if s.LoadedAt.IsZero() || s.Now.Before(opened) {
		return time.Time{}
	}
	return opened
}

// UntilLapse is how long a sweeper that found nothing can wait until it looks again: to the next lapse, which may be locked by
// somebody just now, but most at the longest.
func (s *Snapshot) UntilLapse(most time.Duration) time.Duration {
	if s.NextLapse.IsZero() {
		return most
	}
	return min(max(s.NextLapse.Sub(s.Now), 50*time.Millisecond), most)
}

// State of a reservation.
type State int

// The states of a reservation, as stored. RefundDue is not stored: it is the answer to a payment that could not take effect.
const (
	Held         State = 1
	Confirmed    State = 2
	Released     State = 3
	Expired      State = 4
	Refunded     State = 5 // its units were given back
	RefundedKept State = 6 // its units were not: they stay sold
	RefundDue    State = 7
)

// paid says that a payment took effect on the reservation, whatever came after.
func (s State) paid() bool { return s == Confirmed || s == Refunded || s == RefundedKept }

func (s State) String() string {
	return [...]string{"", "HELD", "CONFIRMED", "RELEASED", "EXPIRED", "REFUNDED", "REFUNDED", "REFUND_DUE"}[s]
}

// Reservation is a buyer's claim on units.
type Reservation struct {
	ID        uuid.UUID
	Buyer     string
	Quantity  int
	Units     []int64 // unit numbers; not filled by replays of a claim
	State     State
	GrantedAt time.Time
	ExpiresAt time.Time
	PaymentID string // of a confirmed or refunded one, and of a refund due
	Reason    string // of a refund due: one of the Due constants
}

// Store is the inventory in one MySQL schema.
type Store struct {
	db     *sql.DB
	audits *sql.DB // for statements that may take minutes
	onHold func(caller string, d time.Duration)
}

// DB gives the connection pool, for statistics and for tests.
func (s *Store) DB() *sql.DB { return s.db }

// Close closes the connections.
func (s *Store) Close() error { return errors.Join(s.db.Close(), s.audits.Close()) }

func joinUnits(units []int64) string {
	var b strings.Builder
	for i, u := range units {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(u, 10))
	}
	return b.String()
}

func splitUnits(s string) ([]int64, error) {
	fields := strings.Split(s, ",")
	units := make([]int64, len(fields))
	for i, f := range fields {
		u, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("reading unit numbers %q: %w", s, err)
		}
		units[i] = u
	}
	return units, nil
}

// joinIDs and splitIDs are how a list of reservations is stored: 16 bytes each.
func joinIDs(reservations []*Reservation) []byte {
	ids := make([]byte, 0, 16*len(reservations))
	for _, r := range reservations {
		ids = append(ids, r.ID[:]...)
	}
	return ids
}

func splitIDs(b []byte) []uuid.UUID {
	ids := make([]uuid.UUID, 0, len(b)/16)
	for ; len(b) >= 16; b = b[16:] {
		ids = append(ids, uuid.UUID(b[:16]))
	}
	return ids
}

// id gives the stored form of an id.
func id(u uuid.UUID) []byte { return u[:] }

func nullTime(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UTC()
}
