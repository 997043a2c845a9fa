package controllers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
	"flashsale.dev/operator/reserver/inventory"
)

// databaseTimeout bounds one pass's questions to the database.
const databaseTimeout = 10 * time.Second

// observe fills s.seen and s.now.
func (s *scope) observe(ctx context.Context) {
	audit := s.seen.Audit
	s.seen = plan.Observed{
		Generation:  s.sale.Generation,
		ForceDelete: s.sale.Annotations[sales.AnnotationForceDelete] == "true",
		Previous:    s.sale.Status,
		Audit:       audit, // made in this pass
		Reservers:   s.pods(ctx, reserverName(s.sale)),
		Sweeper:     s.pods(ctx, sweeperName(s.sale)),
	}
	if s.sale.DeletionTimestamp != nil {
		s.seen.DeletedAt = s.sale.DeletionTimestamp.Time
	}
	s.now = time.Now()
	over := s.sale.Status.Phase == sales.PhaseClosed
	publishing := s.sale.Spec.Webhook != nil && s.seen.Sweeper.Desired > 0
	if over && !publishing && (s.seen.DeletedAt.IsZero() || s.sale.Spec.DeletionPolicy != sales.DeletionDelete) {
		s.Databases.Release(client.ObjectKeyFromObject(s.sale))
		return // nothing to ask
	}
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	if err := s.observeDatabase(ctx); err != nil {
		s.seen.Fault, s.seen.Sale = faultOf(err), nil
		if s.database != nil {
			s.database.doubt()
		}
	}
}

func (s *scope) observeDatabase(ctx context.Context) (err error) {
	if s.database, err = s.openDatabase(ctx); err != nil {
		return err
	}
	if err := s.database.setUp(ctx); err != nil {
		return err
	}
	if w := s.database.warning.Load(); w != nil {
		s.seen.Warning = &plan.Fault{Reason: w.Reason, Message: w.Message}
	}
	snap, err := s.database.Snapshot(ctx, saleID(s.sale))
	if errors.Is(err, inventory.ErrNoSale) {
		s.now, err = s.database.Now(ctx)
		return err
	}
	if err != nil {
		return err
	}
	s.seen.Sale, s.now = snap, snap.Now
	if snap.Sold == snap.Units {
		if s.seen.SoldOutAt, err = s.database.SoldOutAt(ctx, saleID(s.sale)); err != nil {
			return err
		}
	}
	if !snap.ClosedAt.IsZero() && s.sale.Spec.Webhook != nil {
		s.seen.Undelivered, err = s.database.PendingEvents(ctx, saleID(s.sale))
	}
	return err
}

// openDatabase gives the pool that the sale's Secret asks for.
func (s *scope) openDatabase(ctx context.Context) (*database, error) {
	key := client.ObjectKeyFromObject(s.sale)
	if db := s.Databases.Known(key); db != nil && s.sale.Status.ObservedGeneration == s.sale.Generation {
		return db, nil
	}
	name := s.sale.Spec.Database.SecretRef.Name
	secret := &corev1.Secret{}
	err := s.Direct.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: name}, secret)
	if apierrors.IsNotFound(err) {
		return nil, &inventory.SetupError{Reason: sales.ReasonSecretNotFound, Message: fmt.Sprintf("Secret %s does not exist in namespace %s: create it", name, s.sale.Namespace)}
	}
	if err != nil {
		return nil, &inventory.SetupError{Reason: sales.ReasonSecretUnreadable, Message: fmt.Sprintf("Secret %s cannot be read, will keep trying", name), Err: err}
	}
	options, err := inventory.OptionsFromSecret(secret.Data)
	if err != nil {
		return nil, &inventory.SetupError{Reason: sales.ReasonSecretInvalid, Message: fmt.Sprintf("Secret %s: %v", name, err)}
	}
	return s.Databases.Use(key, options)
}

// faultOf gives a database error as the plan sees it.
func faultOf(err error) *plan.Fault {
	setup := inventory.AsSetupError(err)
	person := setup.Reason != inventory.ReasonUnreachable && setup.Reason != inventory.ReasonDatabaseError && setup.Reason != sales.ReasonSecretUnreadable
	return &plan.Fault{Reason: setup.Reason, Message: setup.Error(), Person: person}
}

func (s *scope) pods(ctx context.Context, name string) plan.Pods {
	d := &appsv1.Deployment{}
	// From the cache, which knows the controller's own objects only: what is not there has no pods of ours.
	if err := s.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: name}, d); err != nil || !ours(d, s.sale) {
		return plan.Pods{}
	}
	pods := plan.Pods{Ready: d.Status.ReadyReplicas}
	if d.Spec.Replicas != nil {
		pods.Desired = *d.Spec.Replicas
	}
	return pods
}

// saleID is the key of the sale's rows. Kubernetes gives every object a UUID of its own, also when its name is used again.
func saleID(sale *sales.FlashSale) uuid.UUID { return uuid.MustParse(string(sale.UID)) }
