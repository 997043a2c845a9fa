package inventory_test

import (
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// The tests here replay docs/cases.md: bugs that other systems had in production. Each pod is a line of its own, with
// its own connections.

// Both shoppers stood on the payment page and pressed Pay: the count went to -1.
func TestCase008(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	results := stampede(t, store, sale, 2, buyers(2, 1))
	if n := count(results); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeAllHeld] != 1 {
		t.Fatalf("outcomes %v, want one held; the other is told before any payment page", n)
	}
	for _, r := range results {
		if r.Outcome == inventory.OutcomeHeld {
			if _, err := testmysql.Confirm(store, sale.ID, r.Reservation.ID, "pay"); err != nil {
				t.Fatal(err)
			}
		}
	}
	wantOutcome(t, claimOne(t, store, sale, "late", 1), inventory.OutcomeSoldOut)
}

// Read, add, write back: lost updates oversold.
func TestCase012(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(100).In(t, store)
	if n := count(stampede(t, store, sale, 5, buyers(500, 1))); n[inventory.OutcomeHeld] != 100 || n[inventory.OutcomeAllHeld] != 400 {
		t.Errorf("outcomes %v, want 100 held", n)
	}
}

// Two carts of 100 from a stock of 100 were both paid.
func TestCase015(t *testing.T) {
	store := testmysql.Store(t)
	for range 10 {
		sale := testmysql.Sale(100).MaxPerBuyer(100).In(t, store)
		if n := count(stampede(t, store, sale, 2, buyers(2, 100))); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeAllHeld] != 1 {
			t.Errorf("outcomes %v, want one held and no split of the units", n)
		}
	}
}

// Each cart below the stock, together above it.
func TestCase018(t *testing.T) {
	store := testmysql.Store(t)
	for range 10 {
		sale := testmysql.Sale(10).MaxPerBuyer(10).In(t, store)
		requests := []inventory.Request{{Buyer: "a", Quantity: 6}, {Buyer: "b", Quantity: 6}, {Buyer: "c", Quantity: 5}, {Buyer: "d", Quantity: 5}}
		var held int64
		for _, r := range stampede(t, store, sale, 4, requests) {
			if r.Outcome == inventory.OutcomeHeld {
				held += int64(r.Reservation.Quantity)
			}
		}
		if held == 0 || held > 10 {
			t.Errorf("%d units held", held)
		}
		for i := range 10 - held { // leftovers stay claimable
			wantOutcome(t, claimOne(t, store, sale, fmt.Sprint("late-", i), 1), inventory.OutcomeHeld)
		}
	}
}

// A pending payment did not hold the stock.
func TestCase024(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(5*time.Minute).In(t, store)
	claimOne(t, store, sale, "a", 1)
	for i := range 100 {
		wantOutcome(t, claimOne(t, store, sale, fmt.Sprint("other-", i), 1), inventory.OutcomeAllHeld)
	}
}

// Failed payments and expired orders kept tickets locked.
func TestCase029(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(time.Second).In(t, store)
	first := claimOne(t, store, sale, "a", 1)
	for range 2 { // the provider reports the failure, twice
		if _, err := testmysql.Release(store, sale.ID, first.Reservation.ID); err != nil {
			t.Fatal(err)
		}
	}
	second := claimOne(t, store, sale, "b", 1)
	wantOutcome(t, second, inventory.OutcomeHeld) // back at once
	testmysql.Eventually(t, "without any report, the hold lapses", func() bool {
		r, err := store.Reservation(ctx, sale.ID, second.Reservation.ID)
		return err == nil && r.State == inventory.Expired
	})
	third := claimOne(t, store, sale, "c", 1)
	wantOutcome(t, third, inventory.OutcomeHeld)
	if late := third.Reservation.GrantedAt.Sub(second.Reservation.ExpiresAt); late < 0 || late > 2*time.Second {
		t.Errorf("the unit came back %v after its hold ended", late)
	}
}

// Stock was reduced twice for one payment.
func TestCase040(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	r := claimOne(t, store, sale, "a", 1).Reservation
	var wg sync.WaitGroup
	answers := make([]*inventory.Reservation, 100)
	for i := range answers {
		wg.Go(func() {
			var err error
			if answers[i], err = testmysql.Confirm(store, sale.ID, r.ID, "pay"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, a := range answers {
		if a == nil || a.ID != r.ID || a.State != inventory.Confirmed || a.PaymentID != "pay" {
			t.Fatalf("answer %+v", a)
		}
	}
	if report := testmysql.Audit(t, store, sale.ID); report.Sold != 1 {
		t.Errorf("%d units sold for one payment", report.Sold)
	}
}

// SKIP LOCKED with an ORDER BY that the index cannot serve: one worker's sort locked every candidate, and the next saw
// an empty shelf.
func TestCase066(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1000).In(t, store)
	paused, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = paused.Rollback() }()
	scan(t, paused, inventory.FreshUnitsSQL, sale.ID[:], 1, 1001, 10)
	got := claimOne(t, store, sale, "b", 1)
	wantOutcome(t, got, inventory.OutcomeHeld)
	if got.Reservation.Units[0] != 11 {
		t.Errorf("got unit %d, want 11, the first that is not locked", got.Reservation.Units[0])
	}
}

// A limit of one per user counted orders, and quantity 100 passed.
func TestCase069(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1000).In(t, store)
	wantOutcome(t, claimOne(t, store, sale, "a", 100), inventory.OutcomeLimit)
	if snap, err := store.Snapshot(ctx, sale.ID); err != nil || snap.Available != 1000 {
		t.Errorf("counts %+v, %v", snap, err)
	}
}

// The same user twice: stock -6 while the cache said 0.
func TestCase077(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(50).In(t, store)
	requests := make([]inventory.Request, 50)
	for i := range requests {
		requests[i] = inventory.Request{Buyer: "same", Quantity: 1}
	}
	var wg sync.WaitGroup
	results := make([]inventory.Result, 50)
	for i := range results { // 50 pods, to race as hard as can be
		wg.Go(func() {
			got, err := store.Claim(ctx, sale.ID, inventory.NewLine(fmt.Sprint("pod-", i)), requests[i:i+1])
			if err != nil {
				t.Error(err)
				return
			}
			results[i] = got[0]
		})
	}
	wg.Wait()
	if n := count(results); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeReplay] != 49 {
		t.Errorf("outcomes %v, want one held and 49 replays", n)
	}
	for _, r := range results {
		if r.Reservation == nil || r.Reservation.ID != results[0].Reservation.ID {
			t.Errorf("reservation %+v is not the one of the others", r.Reservation)
		}
	}
}

// A leader that lost its lease, and does not know, goes on provisioning.
func TestCaseK27Loading(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(20_000).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	// The first loader stops in the middle of its work, and goes on when the second one has finished.
	pause, resume := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := store.Load(ctx, sale.ID, func(int64, int64) { once.Do(func() { close(pause); <-resume }) })
		if err != nil {
			t.Error(err)
		}
	})
	<-pause
	newer := sale
	newer.Generation, newer.SKU = 2, "new"
	if err := store.Register(ctx, newer); err != nil {
		t.Fatal(err)
	}
	if n, err := store.Load(ctx, sale.ID, nil); err != nil || n != 20_000 {
		t.Errorf("loaded %d, %v", n, err)
	}
	close(resume)
	wg.Wait()
	if err := store.Register(ctx, sale); err != nil { // the stale writer
		t.Fatal(err)
	}
	snap, err := store.Snapshot(ctx, sale.ID)
	if err != nil {
		t.Fatal(err)
	}
	if snap.Loaded != 20_000 || snap.Available != 20_000 || snap.SKU != "new" {
		t.Errorf("loaded %d, available %d, sku %s: want 20,000 rows and the newer spec", snap.Loaded, snap.Available, snap.SKU)
	}
	testmysql.Audit(t, store, sale.ID)
}

// blocked holds the last row that a transaction of the line writes, and gives what it waits with: the connection of the
// transaction once it has written everything else.
func blocked(t *testing.T, store *inventory.Store, sale inventory.Sale, line, caller string) (connection func() int64, release func()) {
	t.Helper()
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO flashsale_tally (sale_id, line, available, held, sold) VALUES (?, ?, 0, 0, 0)
		ON DUPLICATE KEY UPDATE line = VALUES(line)`, sale.ID[:], line)
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	release = func() { once.Do(func() { _ = tx.Commit() }) }
	t.Cleanup(release)
	return func() (id int64) {
		testmysql.Eventually(t, caller+" waits with everything written", func() bool {
			id = testmysql.Running(t, store, "/* flashsale "+caller+" */ INSERT INTO flashsale_tally")
			return id != 0
		})
		return id
	}, release
}

// killed runs f, whose last write goes to the tally row of line "dying", and kills its connection when everything else is
// written.
func killed(t *testing.T, store *inventory.Store, sale inventory.Sale, caller string, f func() error) {
	t.Helper()
	connection, release := blocked(t, store, sale, "dying", caller)
	failed := make(chan error, 1)
	go func() { failed <- f() }()
	if _, err := testmysql.Admin(t).ExecContext(ctx, fmt.Sprint("KILL ", connection())); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; inventory.Classify(err) != inventory.Unavailable {
		t.Errorf("the killed %s gave %v", caller, err)
	}
	release()
}

// confirmAs confirms, and wants an answer in this state.
func confirmAs(t testing.TB, store *inventory.Store, sale inventory.Sale, r *inventory.Reservation, payment string, want inventory.State) *inventory.Reservation {
	t.Helper()
	got, err := testmysql.Confirm(store, sale.ID, r.ID, payment)
	if err != nil || got.State != want || got.ID != r.ID {
		t.Fatalf("confirming gave %+v, %v; want %v", got, err, want)
	}
	return got
}

func wantCounts(t testing.TB, store *inventory.Store, sale inventory.Sale, available, held, sold int64) {
	t.Helper()
	snap, err := store.Snapshot(ctx, sale.ID)
	if want := (inventory.Counts{Available: available, Held: held, Sold: sold}); err != nil || snap.Counts != want {
		t.Errorf("counts %+v, %v; want %+v", snap.Counts, err, want)
	}
}

// lapse waits until a hold is past its time, and sweeps it.
func lapse(t testing.TB, store *inventory.Store, sale inventory.Sale, r *inventory.Reservation) {
	t.Helper()
	testmysql.Eventually(t, "the hold is swept", func() bool {
		if _, err := store.Sweep(ctx, sale.ID, "sweeper", 100); err != nil {
			t.Fatal(err)
		}
		var state int
		err := store.DB().QueryRowContext(ctx, "SELECT state FROM flashsale_reservation WHERE reservation_id = ?", r.ID[:]).Scan(&state)
		return err == nil && inventory.State(state) == inventory.Expired
	})
}

// The reserve step lost but its siblings had succeeded: an order without units. Here the transaction dies with everything
// written.
func TestCase003(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	killed(t, store, sale, "claim", func() error {
		_, err := store.Claim(ctx, sale.ID, inventory.NewLine("dying"), buyers(1, 1))
		return err
	})
	wantOutcome(t, claimOne(t, store, sale, "winner", 1), inventory.OutcomeHeld)
	wantOutcome(t, claimOne(t, store, sale, "loser", 1), inventory.OutcomeAllHeld)
	var rows int
	err := store.DB().QueryRowContext(ctx, "SELECT COUNT(*) FROM flashsale_reservation").Scan(&rows)
	if err != nil || rows != 1 {
		t.Errorf("%d reservations, %v; want the winner's only", rows, err)
	}
}

// The same locks asked for in opposite order: deadlock.
func TestCase004(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1000).MaxPerBuyer(2).In(t, store)
	lines := []*inventory.Line{inventory.NewLine("a"), inventory.NewLine("b")}
	for round := range 100 {
		x, y := fmt.Sprint("x", round%10), fmt.Sprint("y", round%10) // known and new buyers
		orders := [][]inventory.Request{{{Buyer: x, Quantity: 1}, {Buyer: y, Quantity: 1}, {Buyer: x, Quantity: 1}}, {{Buyer: y, Quantity: 1}, {Buyer: x, Quantity: 1}}}
		held := make([][]inventory.Result, 2)
		var wg sync.WaitGroup
		for i, line := range lines {
			wg.Go(func() {
				var err error
				if held[i], err = store.Claim(ctx, sale.ID, line, orders[i]); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for _, r := range held[0][:2] {
			if _, err := testmysql.Release(store, sale.ID, r.Reservation.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The same article twice, with other custom data, skipped the check.
func TestCase006(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	first := claimKey(t, store, sale, "a", "k1", 1)
	wantOutcome(t, first, inventory.OutcomeHeld)
	second := claimKey(t, store, sale, "a", "k2", 1)
	wantOutcome(t, second, inventory.OutcomeReplay)
	if second.Reservation.ID != first.Reservation.ID {
		t.Error("two reservations")
	}
}

func claimKey(t testing.TB, store *inventory.Store, sale inventory.Sale, buyer, key string, quantity int) inventory.Result {
	t.Helper()
	results, err := store.Claim(ctx, sale.ID, inventory.NewLine("line-"+uuid.NewString()), []inventory.Request{{Buyer: buyer, Quantity: quantity, Key: key}})
	if err != nil {
		t.Fatal(err)
	}
	return results[0]
}

// The reservation was written after the order: two orders for one unit. 013: the second payer failed after paying. 014: both
// pressed Buy on the last page.
func TestCase007_013_014(t *testing.T) {
	store := testmysql.Store(t)
	for range 20 {
		sale := testmysql.Sale(1).In(t, store)
		var wg sync.WaitGroup
		var mu sync.Mutex
		paid, refused := 0, 0
		for i := range 2 {
			wg.Go(func() {
				r := claimOne(t, store, sale, fmt.Sprint("buyer-", i), 1)
				mu.Lock()
				defer mu.Unlock()
				if r.Reservation == nil { // learned before any payment
					refused++
					return
				}
				confirmAs(t, store, sale, r.Reservation, fmt.Sprint("pay-", i), inventory.Confirmed)
				paid++
			})
		}
		wg.Wait()
		if paid != 1 || refused != 1 {
			t.Errorf("%d paid, %d refused", paid, refused)
		}
	}
}

// Limits were validated before the write, and two tabs passed.
func TestCase011(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).In(t, store)
	results := make([]inventory.Result, 10)
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() { results[i] = claimKey(t, store, sale, "a", fmt.Sprint("key-", i), 1) })
	}
	wg.Wait()
	if n := count(results); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeReplay] != 9 {
		t.Errorf("outcomes %v, want one held and nine replays", n)
	}
	wantCounts(t, store, sale, 4, 1, 0)
	for i := range results { // each key has its answer now
		wantOutcome(t, claimKey(t, store, sale, "a", fmt.Sprint("key-", i), 1), inventory.OutcomeReplay)
	}
}

// A promotion on 18 web nodes reached -14.
func TestCase017(t *testing.T) {
	dsn := testmysql.DSN(t)
	store := testmysql.Open(t, dsn)
	if _, err := store.Setup(ctx); err != nil {
		t.Fatal(err)
	}
	sale := testmysql.Sale(50).In(t, store)
	var wg sync.WaitGroup
	var mu sync.Mutex
	n := map[inventory.Outcome]int{}
	for pod := range 18 {
		own := testmysql.Open(t, dsn) // connections of its own
		line := inventory.NewLine(fmt.Sprint("pod-", pod))
		wg.Go(func() {
			for first := pod * 278; first < min((pod+1)*278, 5000); first += 100 {
				var batch []inventory.Request
				for b := first; b < min(first+100, (pod+1)*278, 5000); b++ {
					batch = append(batch, inventory.Request{Buyer: fmt.Sprint("buyer-", b), Quantity: 1})
				}
				results, err := own.Claim(ctx, sale.ID, line, batch)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				for o, k := range count(results) {
					n[o] += k
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if n[inventory.OutcomeHeld] != 50 || n[inventory.OutcomeAllHeld] != 4950 {
		t.Errorf("outcomes %v, want exactly 50 held", n)
	}
}

// Two code paths, two hold times.
func TestCase020(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).TTL(10*time.Minute).In(t, store)
	want := func(r *inventory.Reservation, ttl time.Duration) {
		t.Helper()
		stored, err := store.Reservation(ctx, sale.ID, r.ID)
		if err != nil || stored.ExpiresAt.Sub(stored.GrantedAt) != ttl || !stored.ExpiresAt.Equal(r.ExpiresAt) {
			t.Errorf("granted %v, expires %v, told %v, %v; want %v", stored.GrantedAt, stored.ExpiresAt, r.ExpiresAt, err, ttl)
		}
	}
	single := claimOne(t, store, sale, "single", 1).Reservation
	want(single, 10*time.Minute)
	for _, r := range stampede(t, store, sale, 1, buyers(3, 1)) {
		want(r.Reservation, 10*time.Minute)
	}
	if _, err := testmysql.Release(store, sale.ID, single.ID); err != nil {
		t.Fatal(err)
	}
	want(claimKey(t, store, sale, "returned", "key", 1).Reservation, 10*time.Minute) // a returned unit, with a key
	sale.HoldTTL, sale.Generation = time.Minute, 2
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	want(claimOne(t, store, sale, "new", 1).Reservation, time.Minute)
}

// One-off items got a second buyer within the hold.
func TestCase021(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(5*time.Second).In(t, store)
	a := claimOne(t, store, sale, "a", 1).Reservation
	var b inventory.Result
	testmysql.Eventually(t, "b gets the unit", func() bool {
		b = claimOne(t, store, sale, "b", 1)
		return b.Outcome == inventory.OutcomeHeld
	})
	if after := b.Reservation.GrantedAt.Sub(a.GrantedAt); after < 5*time.Second || after > 7*time.Second {
		t.Errorf("b was granted %v after a, want between the TTL and 2 s more", after)
	}
	confirmAs(t, store, sale, a, "pay-a", inventory.RefundDue)
}

// A shopper was blocked by their own earlier hold.
func TestCase022(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	first := claimKey(t, store, sale, "a", "k1", 1)
	again := claimKey(t, store, sale, "a", "k2", 1) // cancelled at the provider, who did not tell us
	wantOutcome(t, again, inventory.OutcomeReplay)
	if _, err := testmysql.Release(store, sale.ID, first.Reservation.ID); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimKey(t, store, sale, "a", "k3", 1), inventory.OutcomeHeld)
}

// "Sold out" while pending orders held everything and nothing was sold.
func TestCase028(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	held := stampede(t, store, sale, 2, buyers(10, 1))
	wantOutcome(t, claimOne(t, store, sale, "eleventh", 1), inventory.OutcomeAllHeld)
	if snap, err := store.Snapshot(ctx, sale.ID); err != nil || snap.NextLapse.IsZero() {
		t.Errorf("no next expiry: %+v, %v", snap, err)
	}
	for i, r := range held {
		confirmAs(t, store, sale, r.Reservation, fmt.Sprint("pay-", i), inventory.Confirmed)
	}
	wantOutcome(t, claimOne(t, store, sale, "twelfth", 1), inventory.OutcomeSoldOut)
}

// A buyer with the maximum saw "sold out", and cancelling did not restore it.
func TestCase031(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).MaxPerBuyer(5).In(t, store)
	first := claimOne(t, store, sale, "a", 5)
	wantOutcome(t, claimOne(t, store, sale, "a", 5), inventory.OutcomeReplay)
	if _, err := testmysql.Release(store, sale.ID, first.Reservation.ID); err != nil {
		t.Fatal(err)
	}
	wantCounts(t, store, sale, 5, 0, 0)
	bought := claimOne(t, store, sale, "a", 5)
	confirmAs(t, store, sale, bought.Reservation, "pay", inventory.Confirmed)
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeLimit)
}

// Cancelling freed neither ticket nor capacity. 050: it compensated twice.
func TestCase032_050(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).MaxPerBuyer(2).In(t, store)
	a, b := claimOne(t, store, sale, "a", 2).Reservation, claimOne(t, store, sale, "b", 1).Reservation
	confirmAs(t, store, sale, a, "pay", inventory.Confirmed)
	wantCounts(t, store, sale, 0, 1, 2)
	for _, restock := range []bool{true, true, false} { // the first decides
		r, err := store.Refund(ctx, sale.ID, a.ID, "test", restock)
		if err != nil || r.State != inventory.Refunded || r.PaymentID != "pay" {
			t.Errorf("refunding gave %+v, %v", r, err)
		}
		wantCounts(t, store, sale, 2, 1, 0)
	}
	if _, err := testmysql.Release(store, sale.ID, a.ID); !errors.Is(err, inventory.ErrConfirmed) {
		t.Errorf("releasing a refunded one: %v", err)
	}
	for range 2 {
		if _, err := testmysql.Release(store, sale.ID, b.ID); err != nil {
			t.Error(err)
		}
		wantCounts(t, store, sale, 3, 0, 0)
	}
	if got := confirmAs(t, store, sale, a, "pay", inventory.Refunded); got.PaymentID != "pay" { // the payment had its effect
		t.Errorf("confirming again gave %+v", got)
	}
	// The refunded units can be bought again, by the same buyer too.
	again := claimOne(t, store, sale, "a", 2)
	wantOutcome(t, again, inventory.OutcomeHeld)
	confirmAs(t, store, sale, again.Reservation, "pay-2", inventory.Confirmed)
	r, err := store.Refund(ctx, sale.ID, again.Reservation.ID, "test", false)
	if err != nil || r.State != inventory.RefundedKept {
		t.Errorf("refunding without restock gave %+v, %v", r, err)
	}
	wantCounts(t, store, sale, 1, 0, 2)
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeLimit)
}

// The hold lapsed between authorisation and completion of the payment. 038: the callback should try to claim again.
func TestCase034_038(t *testing.T) {
	store := testmysql.Store(t)
	for _, tt := range []struct {
		name  string
		swept bool
		other bool // somebody else got the unit
		want  inventory.State
	}{
		{"the hold has lapsed, no sweeper came by", false, false, inventory.Confirmed},
		{"the unit is back on the shelf", true, false, inventory.Confirmed},
		{"the unit is another's", true, true, inventory.RefundDue},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sale := testmysql.Sale(1).TTL(time.Second).In(t, store)
			a := claimOne(t, store, sale, "a", 1).Reservation
			testmysql.Eventually(t, "the hold lapses", func() bool {
				r, err := store.Reservation(ctx, sale.ID, a.ID)
				return err == nil && r.State == inventory.Expired
			})
			if tt.swept {
				lapse(t, store, sale, a)
			}
			if tt.other {
				b := claimOne(t, store, sale, "b", 1)
				wantOutcome(t, b, inventory.OutcomeHeld)
				confirmAs(t, store, sale, b.Reservation, "pay-b", inventory.Confirmed)
			}
			for range 2 {
				confirmAs(t, store, sale, a, "pay-a", tt.want)
			}
			wantCounts(t, store, sale, 0, 0, 1)
		})
	}
}

// The unit that a lapsed hold had is not the one it gets when it is paid late.
func TestALatePaymentGetsOtherUnits(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).MaxPerBuyer(2).In(t, store)
	a, b := claimOne(t, store, sale, "a", 1).Reservation, claimOne(t, store, sale, "b", 1).Reservation
	for _, r := range []*inventory.Reservation{b, a} {
		if _, err := testmysql.Release(store, sale.ID, r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if got := confirmAs(t, store, sale, b, "pay", inventory.Confirmed); got.Units[0] == b.Units[0] {
		t.Fatalf("got its old unit %v back: the case is not replayed", got.Units)
	}
	testmysql.Audit(t, store, sale.ID)
	wantOutcome(t, claimOne(t, store, sale, "c", 2), inventory.OutcomeHeld) // its old one among them
}

// Money kept, no ticket: the quota was exceeded after the card was charged. 039: A waits, B buys the last place, A pays.
// 044: paid but expired, and the provider retried for ever.
func TestCase035_039_044(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(time.Second).In(t, store)
	a := claimOne(t, store, sale, "a", 1).Reservation
	lapse(t, store, sale, a)
	b := claimOne(t, store, sale, "b", 1).Reservation
	confirmAs(t, store, sale, b, "pay-b", inventory.Confirmed)
	for range 5 {
		if got := confirmAs(t, store, sale, a, "pay-a", inventory.RefundDue); got.Reason != inventory.DueSoldOut {
			t.Errorf("reason %q", got.Reason)
		}
	}
	var due, events int
	err := store.DB().QueryRowContext(ctx, "SELECT COUNT(*), (SELECT COUNT(*) FROM flashsale_outbox WHERE kind = 5) FROM flashsale_ledger WHERE due_payment_id = 'pay-a' AND refunded_at IS NULL").Scan(&due, &events)
	if err != nil || due != 1 || events != 1 {
		t.Errorf("%d refunds due, %d events, %v; want one", due, events, err)
	}
	r, err := store.Refund(ctx, sale.ID, a.ID, "test", true)
	if err != nil || r.State != inventory.RefundDue || r.PaymentID != "pay-a" {
		t.Errorf("refunding gave %+v, %v", r, err)
	}
	wantCounts(t, store, sale, 0, 0, 1)
}

// "Accept late payments" was on, and they were refused without a reason.
func TestCase037(t *testing.T) {
	store := testmysql.Store(t)
	for _, tt := range []struct {
		name   string
		change func(*inventory.Sale)
		want   inventory.State
		reason string
	}{
		{"Reclaim", func(*inventory.Sale) {}, inventory.Confirmed, ""},
		{"Refuse", func(s *inventory.Sale) { s.RefuseLate = true }, inventory.RefundDue, inventory.DuePolicy},
		{"the sale is suspended", func(s *inventory.Sale) { s.Suspended = true }, inventory.RefundDue, inventory.DueOver},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sale := testmysql.Sale(1).TTL(time.Second).In(t, store)
			a := claimOne(t, store, sale, "a", 1).Reservation
			lapse(t, store, sale, a)
			tt.change(&sale)
			sale.Generation = 2
			if err := store.Register(ctx, sale); err != nil {
				t.Fatal(err)
			}
			if got := confirmAs(t, store, sale, a, "pay", tt.want); got.Reason != tt.reason {
				t.Errorf("reason %q, want %q", got.Reason, tt.reason)
			}
		})
	}
	t.Run("the buyer holds others up to the limit", func(t *testing.T) {
		sale := testmysql.Sale(2).TTL(time.Second).In(t, store)
		a := claimOne(t, store, sale, "a", 1).Reservation
		lapse(t, store, sale, a)
		second := claimOne(t, store, sale, "a", 1).Reservation
		if got := confirmAs(t, store, sale, a, "pay", inventory.RefundDue); got.Reason != inventory.DueLimit {
			t.Errorf("reason %q", got.Reason)
		}
		lapse(t, store, sale, second)
	})
}

// Webhook and redirect confirmed the same order together. 043: and it was fulfilled twice.
func TestCase042_043(t *testing.T) {
	const rounds = 1000
	store := testmysql.Store(t)
	sale := testmysql.Sale(rounds).In(t, store)
	held := stampede(t, store, sale, 2, buyers(rounds, 1))
	for i, r := range held {
		var wg sync.WaitGroup
		for _, caller := range []string{"webhook", "redirect"} {
			wg.Go(func() {
				answers, err := store.Confirm(ctx, sale.ID, caller, []inventory.Payment{{Reservation: r.Reservation.ID, ID: fmt.Sprint("pay-", i)}})
				if err != nil || answers[0].Err != nil || answers[0].Reservation.State != inventory.Confirmed {
					t.Errorf("%s: %+v, %v", caller, answers, err)
				}
			})
		}
		wg.Wait()
	}
	wantCounts(t, store, sale, 0, 0, rounds)
	var events int
	err := store.DB().QueryRowContext(ctx, "SELECT SUM(LENGTH(reservation_ids) DIV 16) FROM flashsale_outbox WHERE kind = 2").Scan(&events)
	if err != nil || events != rounds {
		t.Errorf("%d events of %d confirmations, %v", events, rounds, err)
	}
}

// Capture was accepted after the sale had closed.
func TestCase046(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).Window(-time.Minute, 2*time.Second).TTL(3*time.Second).In(t, store)
	live, lapsed := claimOne(t, store, sale, "live", 1).Reservation, claimOne(t, store, sale, "lapsed", 1).Reservation
	testmysql.Eventually(t, "the sale ends", func() bool { return claimOne(t, store, sale, "late", 1).Outcome == inventory.OutcomeClosed })
	for range 2 {
		confirmAs(t, store, sale, live, "pay-live", inventory.Confirmed)
	}
	lapse(t, store, sale, lapsed)
	for range 2 {
		if got := confirmAs(t, store, sale, lapsed, "pay-lapsed", inventory.RefundDue); got.Reason != inventory.DueOver {
			t.Errorf("reason %q", got.Reason)
		}
	}
	if err := store.CloseSale(ctx, sale.ID); err != nil {
		t.Fatal(err)
	}
	confirmAs(t, store, sale, live, "pay-live", inventory.Confirmed)
	confirmAs(t, store, sale, lapsed, "pay-lapsed", inventory.RefundDue)
	wantCounts(t, store, sale, 1, 0, 1)
}

// The card was charged, then the check failed: a confirmation without any hold.
func TestCase047(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	for range 2 {
		got := confirmAs(t, store, sale, &inventory.Reservation{ID: uuid.MustParse("01a22e8b-e5ab-757d-b68a-2cf796e24b5c")}, "pay", inventory.RefundDue)
		if got.Reason != inventory.DueUnknown {
			t.Errorf("reason %q", got.Reason)
		}
	}
	wantCounts(t, store, sale, 1, 0, 0)
}

// Two deliveries passed the "seen?" check together. Here the second one stands between its look-up and its write.
func TestCase048(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).In(t, store)
	a, b := claimOne(t, store, sale, "a", 1).Reservation, claimOne(t, store, sale, "b", 1).Reservation
	_, release := blocked(t, store, sale, "first", "confirm")
	done := make(chan error, 2)
	confirm := func(line string, r *inventory.Reservation) {
		answers, err := store.Confirm(ctx, sale.ID, line, []inventory.Payment{{Reservation: r.ID, ID: "pay"}})
		if err == nil {
			err = answers[0].Err
		}
		done <- err
	}
	waits := func(table string) {
		testmysql.Eventually(t, "a confirmation waits to write "+table, func() bool {
			return testmysql.Running(t, store, "/* flashsale confirm */ INSERT INTO "+table) != 0
		})
	}
	go confirm("first", a)
	waits("flashsale_tally")
	go confirm("second", b) // has not seen the first one's row
	waits("flashsale_ledger")
	release()
	errs := []error{<-done, <-done}
	if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), inventory.ErrPaymentReused) {
		t.Errorf("answers %v, want one effect", errs)
	}
	wantCounts(t, store, sale, 0, 1, 1)
}

// A counter went wrong, and nothing could mend it.
func TestCase054(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(100).In(t, store)
	stampede(t, store, sale, 2, buyers(10, 1))
	for _, q := range []string{
		"UPDATE flashsale_tally SET held = held - 30, sold = sold + 7 WHERE line LIKE 'line-%' LIMIT 1",
		"UPDATE flashsale_tally SET available = 90 WHERE line = 'load'",
	} {
		if _, err := store.DB().ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	if report, err := store.Audit(ctx, sale.ID); err != nil || report.OK {
		t.Fatalf("the audit saw nothing: %+v, %v", report, err)
	}
	// Claims go on while repairs run.
	var wg sync.WaitGroup
	wg.Go(func() {
		if n := count(stampede(t, store, sale, 2, buyers(60, 1))); n[inventory.OutcomeHeld] != 50 || n[inventory.OutcomeReplay] != 10 {
			t.Errorf("outcomes %v", n)
		}
	})
	changed := make([]inventory.Counts, 5)
	for i := range changed {
		wg.Go(func() {
			var err error
			if changed[i], err = store.Repair(ctx, sale.ID); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	repairs := 0
	for _, c := range changed {
		switch c {
		case inventory.Counts{Available: 10, Held: 30, Sold: -7}: // one of them does it
			repairs++
		case inventory.Counts{}:
		default:
			repairs = -10
		}
	}
	if repairs != 1 {
		t.Errorf("the repairs changed %+v", changed)
	}
	wantCounts(t, store, sale, 40, 60, 0)
	testmysql.Audit(t, store, sale.ID)
}

// Repeat clicks of one buyer shut the others out.
func TestCase056(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	clicks := make([]inventory.Request, 1000)
	for i := range clicks {
		clicks[i] = inventory.Request{Buyer: "eager", Quantity: 1}
	}
	if n := count(stampede(t, store, sale, 4, clicks)); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeReplay] != 999 {
		t.Errorf("outcomes %v", n)
	}
	if n := count(stampede(t, store, sale, 4, buyers(9, 1))); n[inventory.OutcomeHeld] != 9 {
		t.Errorf("outcomes of the others %v", n)
	}
}

// With a slow commit, "sold out" was said while units remained, and one buyer got two orders.
func TestCase057(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	connection, release := blocked(t, store, sale, "slow", "claim")
	var slow, second inventory.Result
	var wg sync.WaitGroup
	claim := func(line string, r *inventory.Result) {
		results, err := store.Claim(ctx, sale.ID, inventory.NewLine(line), []inventory.Request{{Buyer: "eager", Quantity: 1}})
		if err != nil {
			t.Error(err)
			return
		}
		*r = results[0]
	}
	wg.Go(func() { claim("slow", &slow) })
	connection()
	wg.Go(func() { claim("second", &second) }) // waits for the first one's commit
	testmysql.Eventually(t, "the second waits", func() bool {
		return testmysql.Running(t, store, "/* flashsale claim */ SELECT buyer") != 0
	})
	for i := range 9 {
		wantOutcome(t, claimOne(t, store, sale, fmt.Sprint("other-", i), 1), inventory.OutcomeHeld)
	}
	wantOutcome(t, claimOne(t, store, sale, "tenth", 1), inventory.OutcomeBusy) // the slow claim's unit may come back
	release()
	wg.Wait()
	wantOutcome(t, claimOne(t, store, sale, "tenth", 1), inventory.OutcomeAllHeld)
	if slow.Reservation == nil || second.Reservation == nil || slow.Reservation.ID != second.Reservation.ID {
		t.Errorf("the buyer got %+v and %+v, want one reservation", slow, second)
	}
	wantCounts(t, store, sale, 0, 10, 0)
}

// Decrementing below zero and rolling back made a smaller request fail in between.
func TestCase058(t *testing.T) {
	store := testmysql.Store(t)
	var wg sync.WaitGroup
	for i := range 10 {
		sale := testmysql.Sale(2).MaxPerBuyer(3).In(t, store)
		wg.Go(func() {
			for round := range 1000 {
				if !smallerRequestWins(t, store, sale) {
					t.Errorf("sale %d, round %d", i, round)
					return
				}
			}
		})
	}
	wg.Wait()
}

// smallerRequestWins lets a ask for three of two units while b asks for two, and b give them back.
func smallerRequestWins(t *testing.T, store *inventory.Store, sale inventory.Sale) bool {
	var both sync.WaitGroup
	both.Go(func() {
		if _, err := store.Claim(ctx, sale.ID, inventory.NewLine("a"), []inventory.Request{{Buyer: "a", Quantity: 3}}); err != nil {
			t.Error(err)
		}
	})
	held, err := store.Claim(ctx, sale.ID, inventory.NewLine("b"), []inventory.Request{{Buyer: "b", Quantity: 2}})
	both.Wait()
	if err != nil || held[0].Outcome != inventory.OutcomeHeld {
		t.Errorf("%+v, %v", held, err)
		return false
	}
	if _, err := testmysql.Release(store, sale.ID, held[0].Reservation.ID); err != nil {
		t.Error(err)
		return false
	}
	return true
}

// A call before the start burned stock.
func TestCase059(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).Window(2*time.Second, 0).In(t, store)
	if n := count(stampede(t, store, sale, 4, buyers(1000, 1))); n[inventory.OutcomeNotOpen] != 1000 {
		t.Fatalf("outcomes %v", n)
	}
	wantCounts(t, store, sale, 5, 0, 0)
	testmysql.Eventually(t, "the sale opens", func() bool { return claimOne(t, store, sale, "first", 1).Outcome == inventory.OutcomeHeld })
	if n := count(stampede(t, store, sale, 4, buyers(1000, 1))); n[inventory.OutcomeHeld] != 4 {
		t.Errorf("outcomes %v", n)
	}
}

// A retried reserve bumped the counter twice, and the capacity was held for ever.
func TestCase062(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).TTL(2*time.Second).In(t, store)
	var both [2]inventory.Result
	var wg sync.WaitGroup
	for i := range both {
		wg.Go(func() { both[i] = claimKey(t, store, sale, "a", "key", 1) })
	}
	wg.Wait()
	later := claimKey(t, store, sale, "a", "key", 1)
	wantOutcome(t, later, inventory.OutcomeReplay)
	if both[0].Reservation.ID != both[1].Reservation.ID || both[0].Reservation.ID != later.Reservation.ID {
		t.Error("one key, several reservations")
	}
	wantCounts(t, store, sale, 4, 1, 0)
	lapse(t, store, sale, later.Reservation)
	wantCounts(t, store, sale, 5, 0, 0)
}

// A key was cleaned up though its work had committed: the retry did it again.
func TestCase064(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).TTL(time.Second).In(t, store)
	first := claimKey(t, store, sale, "a", "key", 1) // its answer never arrives
	lapse(t, store, sale, first.Reservation)
	for range 2 {
		again := claimKey(t, store, sale, "a", "key", 1)
		wantOutcome(t, again, inventory.OutcomeReplay)
		if again.Reservation.ID != first.Reservation.ID || again.Reservation.State != inventory.Expired {
			t.Errorf("the key gave %+v", again.Reservation)
		}
	}
	wantCounts(t, store, sale, 5, 0, 0)
	wantOutcome(t, claimKey(t, store, sale, "a", "key", 2), inventory.OutcomeKeyReused)
	wantOutcome(t, claimKey(t, store, sale, "b", "key", 1), inventory.OutcomeHeld) // another buyer's key
	wantOutcome(t, claimKey(t, store, sale, "a", "another", 1), inventory.OutcomeHeld)
}

// REPEATABLE READ: the snapshot was older than the lock that was waited for, and the last unit was reserved twice.
func TestCase065(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	var global, session string
	query := "SELECT @@GLOBAL.transaction_isolation, @@SESSION.transaction_isolation"
	if testmysql.MariaDB(t) {
		query = "SELECT @@GLOBAL.tx_isolation, @@SESSION.tx_isolation"
	}
	if err := store.DB().QueryRowContext(ctx, query).Scan(&global, &session); err != nil {
		t.Fatal(err)
	}
	if global != "REPEATABLE-READ" || session != "READ-COMMITTED" {
		t.Errorf("the server's default is %s, ours %s", global, session)
	}
	// A transaction that has read before it waits for the lock sees what was committed meanwhile.
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	var owner []byte
	read := func(lock string) error {
		return tx.QueryRowContext(ctx, "SELECT reservation_id FROM flashsale_unit WHERE sale_id = ? AND unit_no = 1 AND reservation_id = 0x00000000000000000000000000000000"+lock, sale.ID[:]).Scan(&owner)
	}
	if err := read(""); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeHeld)
	for _, lock := range []string{"", " FOR UPDATE", " FOR UPDATE SKIP LOCKED"} {
		if err := read(lock); !errors.Is(err, sql.ErrNoRows) {
			t.Errorf("the unit still looks free%s: %v", lock, err)
		}
	}
}

// A claim by one UPDATE scanned many rows, and deadlocked with others.
func TestCase068(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2000).TTL(2*time.Second).In(t, store)
	held := stampede(t, store, sale, 4, buyers(2000, 1))
	stop := make(chan struct{})
	var sweepers, wg sync.WaitGroup
	for i := range 2 {
		sweepers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := store.Sweep(ctx, sale.ID, fmt.Sprint("sweeper-", i), 500); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i, r := range held[:200] { // some in time, some late
		wg.Go(func() {
			if _, err := testmysql.Confirm(store, sale.ID, r.Reservation.ID, fmt.Sprint("pay-", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	testmysql.Eventually(t, "the other holds are swept", func() bool {
		snap, err := store.Snapshot(ctx, sale.ID)
		return err == nil && snap.Held == 0
	})
	close(stop)
	sweepers.Wait()
	wantCounts(t, store, sale, 1800, 0, 200)
}

// Deleting an allocation that was never backed by rows created free units.
func TestCase071(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).In(t, store)
	unknown := uuid.MustParse("01a22e8b-e5ab-757d-b68a-2cf796e24b5c")
	if _, err := testmysql.Release(store, sale.ID, unknown); !errors.Is(err, inventory.ErrNotFound) {
		t.Errorf("releasing: %v", err)
	}
	if _, err := store.Refund(ctx, sale.ID, unknown, "test", true); !errors.Is(err, inventory.ErrNotFound) {
		t.Errorf("refunding: %v", err)
	}
	wantCounts(t, store, sale, 5, 0, 0)
}

// A fulfilled order kept its reservation: it was interrupted between ledger and hold.
func TestCase075(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).In(t, store)
	r := claimOne(t, store, sale, "a", 1).Reservation
	killed(t, store, sale, "confirm", func() error {
		_, err := store.Confirm(ctx, sale.ID, "dying", []inventory.Payment{{Reservation: r.ID, ID: "pay"}})
		return err
	})
	wantCounts(t, store, sale, 4, 1, 0)
	confirmAs(t, store, sale, r, "pay", inventory.Confirmed)
	wantCounts(t, store, sale, 4, 0, 1)
}
